// Command connect-ip is a client or a server of CONNECT-IP (RFC 9484) with quic-go/connect-ip-go and a TUN device.
//
//	connect-ip client -server 192.0.2.1:4433 -tun cip0 -route 10.0.0.0/24 -route fd00::/64
//	connect-ip server -listen 192.0.2.1:4434 -cert server.crt -key server.key -tun cip0 \
//	    -address 10.9.0.1/24 -assign 10.9.0.2/32 -advertise 0.0.0.0/0
//
// Both print a line that starts with "up" as soon as the tunnel carries packets, and exit when the tunnel ends.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"
	"golang.org/x/sys/unix"
)

// The library supports no template with variables; this is the default template for all targets (RFC 9484 §4).
const path = "/.well-known/masque/ip/*/*/"

// The minimum MTU of a tunnel that carries IPv6 (RFC 9484 §7.1).
const mtu = 1280

// Timeout of each step.
const patience = 10 * time.Second

type prefixes []netip.Prefix

func (p *prefixes) String() string { return fmt.Sprint(*p) }
func (p *prefixes) Set(text string) error {
	prefix, err := netip.ParsePrefix(text)
	*p = append(*p, prefix)
	return err
}

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: connect-ip client|server OPTIONS")
	}
	var err error
	switch role := os.Args[1]; role {
	case "client":
		err = client(os.Args[2:])
	case "server":
		err = server(os.Args[2:])
	default:
		err = fmt.Errorf("no such role: %s", role)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func client(words []string) error {
	options := flag.NewFlagSet("client", flag.ExitOnError)
	address := options.String("server", "", "address and port")
	device := options.String("tun", "cip0", "name of the TUN device")
	token := options.String("token", "", "bearer token")
	ask := options.Bool("ask", true, "ask for one address of each family instead of waiting for what comes")
	var routes prefixes
	options.Var(&routes, "route", "network to send into the tunnel; repeatable")
	options.Parse(words)

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	template := uritemplate.MustNew("https://" + *address + path)
	request, err := connectip.NewRequest(ctx, template)
	if err != nil {
		return err
	}
	if *token != "" {
		request.Header().Set("Authorization", "Bearer "+*token)
	}
	transport := connectip.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}},
	}
	conn, response, err := transport.Dial(request)
	if err != nil {
		if response != nil {
			return fmt.Errorf("refused: %d, proxy-status: %s", response.StatusCode, response.Header.Get("Proxy-Status"))
		}
		return err
	}
	defer conn.Close()
	if *ask {
		any := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::/128")}
		if _, err := conn.RequestAddresses(any); err != nil {
			return err
		}
	}
	assigned, err := conn.ReceiveAddressAssignment(ctx)
	if err != nil {
		return fmt.Errorf("no addresses: %w", err)
	}
	advertised, err := conn.Routes(ctx)
	if err != nil {
		return fmt.Errorf("no routes: %w", err)
	}
	tun, err := openTun(*device)
	if err != nil {
		return err
	}
	said := "up"
	for _, one := range assigned {
		if one.Rejected() {
			continue
		}
		if err := ip("address", "add", one.IPPrefix.String(), "dev", *device); err != nil {
			return err
		}
		said += fmt.Sprintf(" address=%s", one.IPPrefix)
	}
	for _, route := range advertised {
		said += fmt.Sprintf(" route=%s-%s/%d", route.StartIP, route.EndIP, route.IPProtocol)
	}
	for _, route := range routes {
		if err := ip("route", "add", route.String(), "dev", *device); err != nil {
			return err
		}
	}
	fmt.Println(said)
	stop, ignore := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer ignore()
	var current atomic.Pointer[connectip.Conn]
	current.Store(conn)
	ended := make(chan error, 2)
	go func() { ended <- receive(conn, tun) }()
	go func() { ended <- send(tun, &current) }()
	select {
	case err := <-ended:
		return err
	case <-stop.Done():
		return nil
	}
}

func server(words []string) error {
	options := flag.NewFlagSet("server", flag.ExitOnError)
	listen := options.String("listen", "", "address and port")
	cert := options.String("cert", "", "certificate")
	key := options.String("key", "", "its private key")
	device := options.String("tun", "cip0", "name of the TUN device")
	unasked := options.Bool("unasked", false, "assign addresses without waiting for a request")
	var own, assign, advertise prefixes
	options.Var(&own, "address", "address of the TUN device with the length of its network; repeatable")
	options.Var(&assign, "assign", "what the client gets; repeatable")
	options.Var(&advertise, "advertise", "network the client may send to, in the order of RFC 9484; repeatable")
	options.Parse(words)

	certificate, err := tls.LoadX509KeyPair(*cert, *key)
	if err != nil {
		return err
	}
	tun, err := openTun(*device)
	if err != nil {
		return err
	}
	for _, address := range own {
		if err := ip("address", "add", address.String(), "dev", *device, "nodad"); err != nil {
			return err
		}
	}
	template := uritemplate.MustNew("https://" + *listen + path)
	// One client, which may come again before its old tunnel has ended.
	var current atomic.Pointer[connectip.Conn]
	go func() { log.Fatal(send(tun, &current)) }()
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		request, err := connectip.ParseProxyRequest(r, template)
		if err != nil {
			log.Printf("refused: %v", err)
			status := http.StatusBadRequest
			if parse, ok := err.(*connectip.ProxyRequestParseError); ok {
				status = parse.HTTPStatus
			}
			w.WriteHeader(status)
			return
		}
		proxy := connectip.Proxy{}
		conn, err := proxy.Proxy(w, request)
		if err == nil {
			current.Store(conn)
			err = serve(conn, tun, assign, advertise, *unasked)
		}
		log.Printf("tunnel ended: %v", err)
	})
	http := http3.Server{
		Addr:            *listen,
		Handler:         mux,
		EnableDatagrams: true,
		TLSConfig:       http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{certificate}}),
		QUICConfig:      &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350},
	}
	packets, err := net.ListenPacket("udp", *listen)
	if err != nil {
		return err
	}
	fmt.Println("up")
	return http.Serve(packets)
}

// serve assigns addresses to a client and carries its packets until it disconnects.
func serve(conn *connectip.Conn, tun *os.File, assign, advertise prefixes, unasked bool) error {
	var routes []connectip.IPRoute
	for _, prefix := range advertise {
		routes = append(routes, connectip.IPRoute{StartIP: prefix.Addr(), EndIP: last(prefix)})
	}
	if unasked {
		if err := conn.AssignAddresses(assign); err != nil {
			return err
		}
	}
	if err := conn.AdvertiseRoute(routes); err != nil {
		return err
	}
	go func() {
		for {
			request, err := conn.ReceiveAddressRequest(context.Background())
			if err != nil {
				return
			}
			answers, rest := match(request.Prefixes, assign)
			if err := request.Respond(answers, rest); err != nil {
				log.Printf("no addresses given: %v", err)
			}
		}
	}()
	return receive(conn, tun)
}

// match answers each request with the first free prefix of its family, and also returns prefixes that were not requested.
func match(requested []netip.Prefix, assign prefixes) (answers, rest []netip.Prefix) {
	rest = slices.Clone(assign)
	for _, wanted := range requested {
		at := slices.IndexFunc(rest, func(p netip.Prefix) bool { return p.Addr().Is4() == wanted.Addr().Is4() })
		if at < 0 {
			answers = append(answers, netip.Prefix{})
			continue
		}
		answers = append(answers, rest[at])
		rest = slices.Delete(rest, at, at+1)
	}
	return answers, rest
}

func last(prefix netip.Prefix) netip.Addr {
	bytes := prefix.Masked().Addr().AsSlice()
	for bit := prefix.Bits(); bit < len(bytes)*8; bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	address, _ := netip.AddrFromSlice(bytes)
	return address
}

// receive writes packets of the tunnel to the TUN device until the tunnel ends.
func receive(conn *connectip.Conn, tun *os.File) error {
	packet := make([]byte, 65536)
	for {
		length, err := conn.ReadPacket(packet)
		if err != nil {
			return fmt.Errorf("from the tunnel: %w", err)
		}
		if _, err := tun.Write(packet[:length]); err != nil {
			log.Printf("the kernel takes no packet of %d bytes: %v", length, err)
		}
	}
}

// send reads packets from the TUN device and sends them into the current tunnel; without one they are dropped.
func send(tun *os.File, current *atomic.Pointer[connectip.Conn]) error {
	packet := make([]byte, 65536)
	for {
		length, err := tun.Read(packet)
		if err != nil {
			return fmt.Errorf("from the TUN: %w", err)
		}
		conn := current.Load()
		if conn == nil {
			continue
		}
		// A tunnel that has ended is told by receive.
		if icmp, err := conn.WritePacket(packet[:length]); err == nil && len(icmp) > 0 {
			tun.Write(icmp)
		}
	}
}

func openTun(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return nil, fmt.Errorf("TUN %s: %w", name, err)
	}
	if err := ip("link", "set", name, "up", "mtu", fmt.Sprint(mtu)); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "/dev/net/tun"), nil
}

func ip(words ...string) error {
	if output, err := exec.Command("ip", words...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(words, " "), err, output)
	}
	return nil
}

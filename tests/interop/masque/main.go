// Command masque is a client or a proxy of CONNECT-UDP (RFC 9298) with quic-go/masque-go.
//
//	masque client -template https://192.0.2.1:4433/.well-known/masque/udp/{target_host}/{target_port}/ \
//	    -to 198.51.100.2:7 -count 20 -size 1000
//	masque proxy -template https://192.0.2.1:4434/.well-known/masque/udp/{target_host}/{target_port}/ \
//	    -listen 192.0.2.1:4434 -cert server.crt -key server.key
//
// The client sends datagrams, expects the echo of each one, and prints "echoed N". The proxy prints "up" when it listens.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/quic-go/masque-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"
)

// Timeout of each step.
const patience = 10 * time.Second

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: masque client|proxy OPTIONS")
	}
	var err error
	switch role := os.Args[1]; role {
	case "client":
		err = client(os.Args[2:])
	case "proxy":
		err = proxy(os.Args[2:])
	default:
		err = fmt.Errorf("no such role: %s", role)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func client(words []string) error {
	options := flag.NewFlagSet("client", flag.ExitOnError)
	template := options.String("template", "", "URI template of the proxy")
	to := options.String("to", "", "host and port that sends back what it gets")
	token := options.String("token", "", "bearer token")
	count := options.Int("count", 1, "how many datagrams")
	size := options.Int("size", 100, "bytes of each")
	options.Parse(words)

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	request, err := masque.NewRequest(ctx, uritemplate.MustNew(*template), *to)
	if err != nil {
		return err
	}
	if *token != "" {
		request.Header().Set("Authorization", "Bearer "+*token)
	}
	transport := masque.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}},
		QUICConfig:      &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350},
	}
	conn, response, err := transport.Dial(request)
	if err != nil {
		if response != nil {
			return fmt.Errorf("refused: %d, proxy-status: %s", response.StatusCode, response.Header.Get("Proxy-Status"))
		}
		return err
	}
	defer conn.Close()
	buffer := make([]byte, 65536)
	for number := range *count {
		sent := make([]byte, *size)
		for at := range sent {
			sent[at] = byte(rand.Uint32())
		}
		if _, err := conn.WriteTo(sent, nil); err != nil {
			return fmt.Errorf("datagram %d: %w", number, err)
		}
		conn.SetReadDeadline(time.Now().Add(patience))
		length, _, err := conn.ReadFrom(buffer)
		if err != nil {
			return fmt.Errorf("no answer to datagram %d: %w", number, err)
		}
		if !bytes.Equal(sent, buffer[:length]) {
			return fmt.Errorf("datagram %d came back with other bytes (%d of %d)", number, length, *size)
		}
	}
	fmt.Println("echoed", *count)
	return nil
}

func proxy(words []string) error {
	options := flag.NewFlagSet("proxy", flag.ExitOnError)
	text := options.String("template", "", "URI template for clients")
	listen := options.String("listen", "", "address and port")
	cert := options.String("cert", "", "certificate")
	key := options.String("key", "", "its private key")
	options.Parse(words)

	certificate, err := tls.LoadX509KeyPair(*cert, *key)
	if err != nil {
		return err
	}
	template, err := uritemplate.New(*text)
	if err != nil {
		return err
	}
	if _, err := url.Parse(*text); err != nil {
		return err
	}
	proxy := masque.Proxy{}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		request, err := masque.ParseProxyRequest(r, template)
		if err != nil {
			log.Printf("refused: %v", err)
			status := http.StatusBadRequest
			if parse, ok := err.(*masque.ProxyRequestParseError); ok {
				status = parse.HTTPStatus
			}
			w.WriteHeader(status)
			return
		}
		log.Printf("for %s: %v", request.Target, proxy.Proxy(w, request))
	})
	server := http3.Server{
		Addr:            *listen,
		Handler:         mux,
		EnableDatagrams: true,
		TLSConfig:       http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{certificate}}),
	}
	packets, err := net.ListenPacket("udp", *listen)
	if err != nil {
		return err
	}
	fmt.Println("up")
	return server.Serve(packets)
}

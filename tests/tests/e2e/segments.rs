//! The TCP segments that the client's split-TCP proxy writes to the TUN are valid: tshark reports no faults.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use mpvpn_packet::{checksum, protocol};
use mpvpn_tests::{
    eventually,
    http::{Download, MB, TestPages, upload},
    machine_share::{MachineShare, Share},
    testbed::{Direction, Host, Testbed, inet4},
};

/// How long a test waits for an expected state. Longer than on any busy machine; only a failing test takes
/// that long.
const TIMEOUT: Duration = Duration::from_secs(60);
/// tshark's fields for retransmitted, reordered, missing and malformed segments. Nothing is lost between the
/// client and its kernel, so none may occur.
const FAULTS: [&str; 7] = [
    "tcp.analysis.retransmission",
    "tcp.analysis.fast_retransmission",
    "tcp.analysis.spurious_retransmission",
    "tcp.analysis.out_of_order",
    "tcp.analysis.lost_segment",
    "tcp.analysis.ack_lost_segment",
    "_ws.malformed",
];

/// A running packet capture on the TUN.
struct Capture {
    tcpdump: Child,
    file: PathBuf,
}

impl Capture {
    fn start(testbed: &Testbed, interface: &str) -> Self {
        let file = testbed.dir().join("tun.pcap");
        let log = fs::File::create(testbed.dir().join("tcpdump.log")).expect("a file to write");
        let tcpdump = testbed
            .command(Host::Client, "tcpdump")
            .args(["-n", "-U", "-s", "0", "-B", "65536", "-Z", "root", "-i", interface, "-w"])
            .arg(&file)
            .arg("tcp")
            .stderr(Stdio::from(log))
            .spawn()
            .expect("tcpdump runs");
        let capture = Self { tcpdump, file };
        eventually(Duration::from_secs(10), "tcpdump listens", || {
            let tcpdump_log = capture.tcpdump_log();
            if tcpdump_log.contains("listening on") { Ok(()) } else { Err(tcpdump_log) }
        });
        capture
    }

    fn tcpdump_log(&self) -> String {
        fs::read_to_string(self.file.with_file_name("tcpdump.log")).unwrap_or_default()
    }

    /// Ends the capture; returns its file.
    fn finish(mut self) -> PathBuf {
        let pid = rustix::process::Pid::from_child(&self.tcpdump);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("our own child");
        self.tcpdump.wait().expect("our own child");
        let tcpdump_log = self.tcpdump_log();
        assert!(tcpdump_log.contains("\n0 packets dropped by kernel"), "{tcpdump_log}");
        self.file
    }
}

/// The fields of the packets that match `filter`, one line per packet.
fn tshark(file: &PathBuf, filter: &str, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    command.arg("-n").arg("-r").arg(file).args([
        "-o",
        "tcp.check_checksum:TRUE",
        "-Y",
        filter,
        "-T",
        "fields",
    ]);
    fields.iter().for_each(|field| _ = command.args(["-e", field]));
    let output = command.stdin(Stdio::null()).output().expect("tshark runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Opens a connection from the client to the host behind the server; returns both ends.
fn connect(testbed: &Testbed) -> (TcpStream, TcpStream) {
    let listener =
        testbed.in_namespace(Host::Inet, || TcpListener::bind((inet4().as_str(), 0))).expect("a free port");
    let to = listener.local_addr().expect("an address");
    let near = testbed.in_namespace(Host::Client, || TcpStream::connect(to)).expect("a way there");
    let (far, _) = listener.accept().expect("a connection");
    for end in [&near, &far] {
        end.set_read_timeout(Some(TIMEOUT)).expect("no zero");
        end.set_write_timeout(Some(TIMEOUT)).expect("no zero");
    }
    (near, far)
}

fn read_to_end_of(mut from: &TcpStream) -> usize {
    let mut all = Vec::new();
    from.read_to_end(&mut all).expect("an end in good order");
    all.len()
}

/// The app closes its direction, and receives data in the other one.
fn half_close((near, far): (TcpStream, TcpStream)) {
    (&near).write_all(&vec![1; 100_000]).expect("room");
    near.shutdown(Shutdown::Write).expect("a connection");
    assert_eq!(read_to_end_of(&far), 100_000);
    (&far).write_all(&vec![2; 300_000]).expect("room");
    drop(far);
    assert_eq!(read_to_end_of(&near), 300_000);
}

/// One end closes with unread data: the other end must get a reset.
fn close_with_unread_data(one: TcpStream, other: TcpStream) {
    (&other).write_all(&[3; 5000]).expect("room");
    one.peek(&mut [0; 1]).expect("a byte");
    drop(one);
    let error = (&other).read(&mut [0; 1]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}

/// An app that reads nothing until its window closes, then reads everything.
fn read_slowly((near, far): (TcpStream, TcpStream)) {
    const BYTES: usize = 12_000_000;
    thread::scope(|scope| {
        scope.spawn(move || (&far).write_all(&vec![4; BYTES]).expect("room in the end"));
        thread::sleep(Duration::from_secs(3));
        assert_eq!(read_to_end_of(&near), BYTES);
    });
}

/// Whether the checksum field has the sum of the pseudo-header only, which leaves the rest to checksum
/// offload.
fn is_checksum_offloaded(line: &str) -> bool {
    let fields: Vec<_> = line.split('\t').collect();
    let [source, destination, total, header, found] = fields[..] else { return false };
    let address = |text: &str| text.parse().map(|ip: Ipv4Addr| ip.octets()).unwrap_or_default();
    let length = |text: &str| text.parse::<usize>().unwrap_or_default();
    let addresses = [address(source), address(destination)].concat();
    let partial = checksum::pseudo(&addresses, protocol::TCP, length(total) - length(header));
    u16::from_str_radix(found.trim_start_matches("0x"), 16) == Ok(partial)
}

#[test]
fn tshark_finds_no_faults_in_segments_for_apps() {
    let _share = MachineShare::take(Share::Percent(50));
    let testbed = Testbed::new(&["60mbit,10ms,loss=1%", "40mbit,20ms,loss=1%"]);
    let _server = testbed.server(&[]);
    let client = testbed.client(&["--lane", "stream", "--tun-name", "mpvpn0"]);
    for link in ["eth1", "eth2"] {
        client.wait_for_path(link, "active", Duration::from_secs(5));
    }
    let own = client.address(mpvpn_tests::testbed::Family::V4);
    let site = TestPages::start(&testbed, Host::Inet);
    let capture = Capture::start(&testbed, "mpvpn0");
    let download = Download::start(&testbed, &site, &inet4(), 10 * MB, TIMEOUT, &[]);
    // There is no listener.
    let refused = format!("{}:81", inet4());
    testbed.in_namespace(Host::Client, || TcpStream::connect(&refused)).expect_err("a refusal");
    let pairs: Vec<_> = (0..4).map(|_| connect(&testbed)).collect();
    let [first, second, third, fourth] = <[_; 4]>::try_from(pairs).expect("four of them");
    thread::scope(|scope| {
        scope.spawn(|| half_close(first));
        scope.spawn(|| close_with_unread_data(second.0, second.1));
        scope.spawn(|| close_with_unread_data(third.1, third.0));
        scope.spawn(|| read_slowly(fourth));
        for link in [1, 2, 1] {
            thread::sleep(Duration::from_secs(1));
            testbed.link(link).silence(Direction::Both);
            thread::sleep(Duration::from_millis(700));
            testbed.link(link).end_silence();
        }
    });
    download.finish();
    upload(&testbed, &site, &inet4(), 4 * MB, TIMEOUT);
    let file = capture.finish();

    // A reset by this machine's kernel, of a connection by TCP that the client gave up, is none of them.
    let proxy_segments = format!("tcp && ip.dst == {own}");
    let all = tshark(&file, &proxy_segments, &["tcp.flags", "tcp.len"]);
    assert!(all.len() > 500, "only {} packets", all.len());
    let zero_windows =
        tshark(&file, &format!("tcp.analysis.zero_window && ip.src == {own}"), &["frame.number"]);
    assert!(!zero_windows.is_empty(), "the slow reader's window never closed");
    let resets = tshark(&file, &format!("{proxy_segments} && tcp.flags.reset == 1"), &["frame.number"]);
    assert!(resets.len() >= 2, "a refusal and a reset from afar: {resets:?}");
    let what = ["frame.number", "ip.src", "tcp.srcport", "tcp.dstport", "tcp.seq", "tcp.len", "_ws.col.Info"];
    for fault in FAULTS {
        let found = tshark(&file, &format!("{proxy_segments} && {fault}"), &what);
        assert!(
            found.is_empty(),
            "{fault}: {} of {}:\n{:#?}",
            found.len(),
            all.len(),
            &found[..found.len().min(20)]
        );
    }
    let unverified =
        tshark(&file, &format!("{proxy_segments} && tcp.checksum.status == 2"), &["frame.number"]);
    assert!(unverified.is_empty(), "checksums that tshark did not look at: {unverified:?}");
    let wrong = tshark(
        &file,
        &format!("{proxy_segments} && (tcp.checksum.status == 0 || ip.checksum.status == 0)"),
        &["ip.src", "ip.dst", "ip.len", "ip.hdr_len", "tcp.checksum"],
    );
    let wrong: Vec<_> = wrong.iter().filter(|line| !is_checksum_offloaded(line)).collect();
    assert!(wrong.is_empty(), "wrong checksums: {:#?}", &wrong[..wrong.len().min(20)]);
    let foreign: Vec<_> = tshark(&file, &proxy_segments, &["ip.src"]);
    let others: Vec<_> = foreign.iter().filter(|source| **source != inet4()).collect();
    assert!(others.is_empty(), "{others:?}");
}

use std::{sync::Arc, time::Duration};

use tokio::{
    io::{DuplexStream, duplex},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::*;

/// The longest wait for anything.
const SOON: Duration = Duration::from_secs(10);

/// A running pump, and its two ends.
struct Stage {
    peer: UdpSocket,
    /// The address of the pump's socket.
    pump: SocketAddr,
    far: DuplexStream,
    counters: Arc<PumpCounters>,
    task: JoinHandle<Result<(), PumpError>>,
}

impl Stage {
    /// `room` is the capacity of the stream in each direction (bytes).
    fn new(room: usize) -> Self {
        let options =
            UdpOptions { recv_buffer: Some(8 << 20), ..UdpOptions::new((Ipv4Addr::LOCALHOST, 0).into()) };
        let peer = UdpSocket::bind(&options).unwrap();
        let socket = LoopbackSocket::connect(peer.local_addr().unwrap()).unwrap();
        let pump = socket.local_addr().unwrap();
        peer.connect(pump).unwrap();
        let (near, far) = duplex(room);
        let counters = Arc::new(PumpCounters::default());
        let counted = Arc::clone(&counters);
        let task = tokio::spawn(async move { super::pump(&socket, near, &counted).await });
        Self { peer, pump, far, counters, task }
    }

    fn send(&self, segment: Option<u16>, data: &[u8]) {
        let out = Outgoing { to: self.pump, from: None, ecn: None, dscp: 0, segment_size: segment, data };
        self.peer.send(&out).unwrap();
    }

    /// The next messages at the peer: segment size and bytes.
    async fn next(&self) -> Vec<(usize, Vec<u8>)> {
        let mut batch = RecvBatch::new(16);
        let arrive = async {
            while self.peer.recv_batch(&mut batch).unwrap() == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(SOON, arrive).await.unwrap();
        batch.drain().map(|got| (got.segment_size, got.data.to_vec())).collect()
    }

    /// The payloads of the next datagrams at the far end of the stream.
    async fn payloads(&mut self, count: usize) -> Vec<Vec<u8>> {
        let mut reader = CapsuleReader::datagrams(MAX_DATAGRAM_LEN);
        let mut all = Vec::new();
        let mut buffer = [0; 4096];
        while all.len() < count {
            let len = timeout(SOON, self.far.read(&mut buffer)).await.unwrap().unwrap();
            reader.push(&buffer[..len]);
            while let Some(capsule) = reader.next().unwrap() {
                let Capsule::Datagram(value) = capsule else { panic!("{capsule:?}") };
                assert_eq!(value[0], 0, "the context of UDP payloads");
                all.push(value[1..].to_vec());
            }
        }
        all
    }

    async fn write(&mut self, bytes: &[u8]) {
        timeout(SOON, self.far.write_all(bytes)).await.unwrap().unwrap();
    }

    /// The pump's result.
    async fn end(self) -> Result<(), PumpError> {
        timeout(SOON, self.task).await.unwrap().unwrap()
    }
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

fn capsule(context: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = BytesMut::new();
    encode_datagram_header(varint::len(context) + payload.len(), &mut out);
    varint::encode(context, &mut out);
    out.extend_from_slice(payload);
    out.to_vec()
}

#[test]
fn datagrams_become_capsules_in_order() {
    run(async {
        let mut stage = Stage::new(1 << 16);
        stage.send(None, b"alone");
        stage.send(Some(1200), &[7; 3 * 1200 + 5]);
        stage.send(None, &[9; 9000]);
        let payloads = stage.payloads(6).await;
        assert_eq!(payloads[0], b"alone");
        assert_eq!(payloads[1..].iter().map(Vec::len).collect::<Vec<_>>(), [1200, 1200, 1200, 5, 9000]);
        assert_eq!((stage.counters.sent.packets(), stage.counters.sent.bytes()), (6, 5 + 3605 + 9000));
        assert_eq!(stage.counters.received.packets(), 0);
    });
}

#[test]
fn capsules_become_datagrams_and_equal_ones_leave_together() {
    run(async {
        let mut stage = Stage::new(1 << 16);
        let mut bytes = Vec::new();
        (0..10).for_each(|i| bytes.extend(capsule(0, &[i; 1200])));
        bytes.extend(capsule(0, &[10; 500]));
        // An unknown capsule type, an unknown context, and an empty payload.
        bytes.extend([0x17, 3, 1, 2, 3]);
        bytes.extend(capsule(1, &[66; 1200]));
        bytes.extend(capsule(0, &[]));
        (11..14).for_each(|i| bytes.extend(capsule(0, &[i; 700])));
        stage.write(&bytes).await;
        let mut got = Vec::new();
        while got.iter().map(|(_, data): &(usize, Vec<u8>)| data.len()).sum::<usize>() < 12_500 + 2100 {
            got.extend(stage.next().await);
        }
        let sizes: Vec<_> = got.iter().map(|(segment, data)| (*segment, data.len())).collect();
        assert_eq!(sizes, [(1200, 12_500), (700, 2100)]);
        assert_eq!((got[0].1[12_499], got[1].1[0], got[1].1[2099]), (10, 11, 13));
        assert_eq!((stage.counters.received.packets(), stage.counters.received.bytes()), (14, 14_600));
    });
}

#[test]
fn capsules_may_come_in_any_pieces() {
    run(async {
        let mut stage = Stage::new(1);
        for (at, size) in [1_usize, 63, 64, 1400, 1, 9000].into_iter().enumerate() {
            stage.write(&capsule(0, &vec![at as u8; size])).await;
            assert_eq!(stage.next().await, [(size, vec![at as u8; size])]);
        }
    });
}

#[test]
fn a_stream_that_ends_between_capsules_ends_in_peace_and_one_inside_does_not() {
    run(async {
        for (rest, is_clean) in [(&b""[..], true), (b"\x00\x08\x00", false)] {
            let mut stage = Stage::new(1 << 16);
            stage.write(&capsule(0, b"last")).await;
            stage.write(rest).await;
            stage.far.shutdown().await.unwrap();
            assert_eq!(stage.next().await, [(4, b"last".to_vec())]);
            let ended = stage.end().await;
            assert_eq!(ended.is_ok(), is_clean, "{ended:?}");
        }
    });
}

#[test]
fn malformed_and_endless_capsules_end_the_pump_without_costing_memory() {
    run(async {
        let endless = [&[0][..], &[0xff; 8]].concat();
        let empty = vec![0, 0];
        let large = [&[0][..], &0x8001_0010_u32.to_be_bytes()].concat();
        for (bytes, needle) in
            [(endless, "expected at most"), (empty, "context ID"), (large, "expected at most")]
        {
            let mut stage = Stage::new(1 << 16);
            stage.write(&bytes).await;
            let error = stage.end().await.unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
        // A capsule of an unknown type is skipped as it arrives, whatever its length.
        let mut stage = Stage::new(1 << 16);
        stage.write(&[&[0x17][..], &[0xff; 8]].concat()).await;
        for _ in 0..100 {
            stage.write(&[0; 1 << 16]).await;
        }
        assert!(!stage.task.is_finished());
    });
}

#[test]
fn what_a_stream_does_not_take_is_dropped_instead_of_kept() {
    run(async {
        let mut stage = Stage::new(4096);
        let (train, trains) = (vec![1; 40 * 1200], 400);
        for _ in 0..trains {
            stage.send(Some(1200), &train);
            tokio::task::yield_now().await;
        }
        let mut rest = Vec::new();
        let idle = Duration::from_millis(500);
        let mut buffer = vec![0; 1 << 16];
        while let Ok(len) = timeout(idle, stage.far.read(&mut buffer)).await {
            rest.extend_from_slice(&buffer[..len.unwrap()]);
        }
        let kept = rest.len();
        assert!((64 << 10..2 << 20).contains(&kept), "{kept} of {} bytes were kept", train.len() * trains);
        assert_eq!(stage.counters.sent.bytes() / 1200, stage.counters.sent.packets());
    });
}

#[test]
fn as_much_may_wait_as_the_stream_takes_in_a_moment() {
    let start = Instant::now();
    let mut sizer = RecvBufferSizer::new(start);
    let mut takes = |from: u32, to: u32, bytes| {
        let mut last = None;
        for ms in from..to {
            last = sizer.on_written(start + ms * Duration::from_millis(1), bytes).or(last);
        }
        last
    };
    assert_eq!(takes(0, 100, 1_000), None, "8 Mbit/s");
    assert!(takes(100, 200, 20_000).is_some_and(|bytes| (900_000..1_100_000).contains(&bytes)), "160 Mbit/s");
    assert_eq!(takes(200, 300, 500_000), Some(MAX_RECV_BUFFER), "4 Gbit/s");
    assert_eq!(takes(300, 700, 1_000), Some(MIN_RECV_BUFFER), "8 Mbit/s again");
}

//! Connections to a real front, whose QUIC is a socket that sends back what it gets.

use std::{net::Ipv4Addr, sync::mpsc};

use mpvpn_control::config::{AuthMode, ServerAddr};
use tokio::net::UdpSocket;

use super::*;
use crate::front::tests::Served;

/// Whatever is waited for comes within this time.
const SOON: Duration = Duration::from_secs(20);

/// A client of a server in this process.
struct Stage {
    stable: Arc<Stable>,
    to: SocketAddr,
    sockets: Sockets,
    planes: Vec<UdpSocket>,
    tell: mpsc::Sender<News>,
    news: mpsc::Receiver<News>,
}

impl Stage {
    /// With so many classes.
    async fn new(served: &Served, token: &str, classes: usize) -> Self {
        let (host, port) = (served.address.ip().to_string(), served.address.port());
        let server = ServerAddr { host, port };
        let config = ClientConfig { token: token.parse().ok(), ..ClientConfig::new(server, Trust::Insecure) };
        let stable = Arc::new(Stable::new(&config, Handle::current()).unwrap());
        let mut planes = Vec::new();
        for _ in 0..classes {
            planes.push(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
        }
        let (tell, news) = mpsc::channel();
        Self { stable, to: served.address, sockets: Sockets::default(), planes, tell, news }
    }

    fn start(&self, failures: u32, before: Option<AbortHandle>) -> Carriage {
        let footing = Footing {
            name: "lo".to_owned(),
            addresses: vec![Ipv4Addr::LOCALHOST.into()],
            mark: None,
            protect: None,
            is_given: false,
        };
        let planes = self.planes.iter().map(|plane| plane.local_addr().unwrap()).collect();
        let sockets = Arc::clone(&self.sockets);
        let plan = Plan { footing, to: vec![self.to], planes, sockets, failures, dscp: 0 };
        let tell = self.tell.clone();
        Carriage::start(&self.stable, plan, before, move |news| drop(tell.send(news)))
    }

    /// The next news.
    async fn next(&self) -> News {
        let next = async {
            loop {
                match self.news.try_recv() {
                    Ok(news) => return news,
                    Err(_) => sleep(Duration::from_millis(1)).await,
                }
            }
        };
        timeout(SOON, next).await.unwrap()
    }

    async fn stands(&self) -> Stands {
        match self.next().await {
            News::Stands(stands) => stands,
            other => panic!("{other:?}"),
        }
    }

    /// What the socket of a class gets back of what it sends.
    async fn there_and_back(&self, class: usize, entry: SocketAddr, text: &[u8]) {
        self.planes[class].send_to(text, entry).await.unwrap();
        let mut buffer = [0; 100];
        let (len, from) = timeout(SOON, self.planes[class].recv_from(&mut buffer)).await.unwrap().unwrap();
        assert_eq!((&buffer[..len], from), (text, entry));
    }
}

#[tokio::test]
async fn each_class_has_its_stream_and_a_new_connection_takes_over_under_the_same_addresses() {
    let served = Served::start(|_| {});
    let stage = Stage::new(&served, served.token.trim_start_matches("Bearer "), 3).await;
    let first = stage.start(0, None);
    let stands = stage.stands().await;
    assert_eq!((stands.remote, stands.pumps.len()), (served.address, 3));
    for (class, text) in [b"one", b"two", b"six"].into_iter().enumerate() {
        stage.there_and_back(class, stands.pumps[class], text).await;
    }
    let _second = stage.start(1, Some(first.handle()));
    let again = stage.stands().await;
    assert_eq!(again.pumps, stands.pumps);
    assert!(again.local != stands.local && !again.multipath, "another connection, of TCP alone: {again:?}");
    stage.there_and_back(2, stands.pumps[2], b"new").await;
    assert!(stage.news.try_recv().is_err(), "the first one is over, and nobody asks why");
}

#[tokio::test]
async fn what_went_wrong_is_told_in_words() {
    let served = Served::start(|_| {});
    let stage = Stage::new(&served, "mpvpn_wrong", 1).await;
    let _carriage = stage.start(0, None);
    let News::Failed(reason) = stage.next().await else { panic!("it failed") };
    assert!(reason.contains("401") || reason.contains("404"), "{reason}");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let stage = Stage { to: nobody, ..stage };
    let _carriage = stage.start(0, None);
    let News::Failed(reason) = stage.next().await else { panic!("it failed") };
    assert!(reason.contains("refused"), "{reason}");
}

#[tokio::test]
async fn the_end_of_a_server_is_told() {
    let served = Served::start(|config| config.auth = AuthMode::None);
    let stage = Stage::new(&served, "", 1).await;
    // Somebody on the way, who will be gone.
    let way = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stage = Stage { to: way.local_addr().unwrap(), ..stage };
    let server = served.address;
    let middle = tokio::spawn(async move {
        let (mut near, _) = way.accept().await.unwrap();
        let mut far = TcpStream::connect(server).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
    });
    let _carriage = stage.start(0, None);
    let stands = stage.stands().await;
    stage.there_and_back(0, stands.pumps[0], b"here").await;
    middle.abort();
    let News::Ended(reason) = stage.next().await else { panic!("it ended") };
    assert!(!reason.is_empty());
}

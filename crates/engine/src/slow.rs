//! The thread for everything that may block: the local API and name resolution.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

use mpvpn_control::{api, config::ServerAddr};
use mpvpn_os::poll::Wake;
use tokio::sync::mpsc;

use crate::EngineError;

/// Messages that may wait for the data plane.
const MESSAGES: usize = 64;

/// What the slow thread wants of the data plane.
pub(crate) enum Message {
    /// Somebody asks over the local API.
    Asked(api::Question),
    /// A name was resolved, or could not be.
    Resolved(Result<Vec<SocketAddr>, String>),
}

/// The data plane's end of the slow thread. Dropping it ends the thread.
pub(crate) struct Slow {
    names: Option<mpsc::UnboundedSender<ServerAddr>>,
    messages: Receiver<Message>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    /// Starts the thread.
    pub(crate) fn start(api: api::Server, wake: Wake) -> Result<Self, EngineError> {
        let (names, requests) = mpsc::unbounded_channel();
        let (sender, messages) = sync_channel(MESSAGES);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(EngineError::io("start the runtime"))?;
        let thread = std::thread::Builder::new()
            .name("slow".to_owned())
            .spawn(move || runtime.block_on(serve(api, requests, sender, wake)))
            .map_err(EngineError::io("start a thread"))?;
        Ok(Self { names: Some(names), messages, thread: Some(thread) })
    }

    /// Asks for the addresses of a server; they come as a [`Message::Resolved`].
    pub(crate) fn resolve(&self, server: &ServerAddr) {
        if let Some(names) = &self.names {
            // The thread ends only with this value.
            let _ = names.send(server.clone());
        }
    }

    /// The next message.
    pub(crate) fn next(&self) -> Option<Message> {
        self.messages.try_recv().ok()
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.names = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it happened.
            let _ = thread.join();
        }
    }
}

async fn serve(
    api: api::Server,
    mut requests: mpsc::UnboundedReceiver<ServerAddr>,
    messages: SyncSender<Message>,
    wake: Wake,
) {
    let post = {
        let (messages, wake) = (messages.clone(), wake.clone());
        move |message| {
            // A data plane that is this far behind answers nobody; dropping the request says so.
            let _ = messages.try_send(message);
            wake.wake();
        }
    };
    let asked = post.clone();
    let source: api::Source = Arc::new(move |question| asked(Message::Asked(question)));
    let names = async move {
        while let Some(server) = requests.recv().await {
            let found = match tokio::net::lookup_host((server.host.as_str(), server.port)).await {
                Ok(addresses) => Ok(addresses.collect()),
                Err(error) => Err(error.to_string()),
            };
            post(Message::Resolved(found));
        }
    };
    tokio::select! {
        result = api.serve(source) => if let Err(error) = result {
            tracing::warn!(%error, "the local API has ended");
        },
        () = names => {}
    }
}

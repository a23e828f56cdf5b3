//! The links of measured flows, as the client is told again and again while a measurement runs.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use mpvpn_input::Error;
use mpvpn_status::measure::{MeasureRequest, MeasureState};

/// How often the request is repeated. The client forgets it after 10 s.
const REPEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The request of a measurement. When it is dropped, measured flows have no links of their own any more.
#[derive(Debug)]
pub(super) struct LinkLease {
    socket: PathBuf,
    request: Arc<Mutex<MeasureRequest>>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LinkLease {
    /// Asks the client at `socket`.
    pub(super) fn begin(socket: &Path, request: MeasureRequest) -> Result<(Self, MeasureState), Error> {
        let state = mpvpn_api::measure(socket, &request)?;
        let request = Arc::new(Mutex::new(request));
        let (stop, stopped) = mpsc::channel::<()>();
        let (path, repeated) = (socket.to_owned(), Arc::clone(&request));
        let repeat = move || {
            while stopped.recv_timeout(REPEAT_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                let request = repeated.lock().unwrap_or_else(PoisonError::into_inner).clone();
                // A client that restarts is asked again.
                let _ = mpvpn_api::measure(&path, &request);
            }
        };
        let thread = thread::Builder::new().name("lease".to_owned()).spawn(repeat).ok();
        Ok((Self { socket: socket.to_owned(), request, stop: Some(stop), thread }, state))
    }

    /// The only links that measured flows may use.
    pub(super) fn links(&self) -> Vec<String> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner).only.clone()
    }

    /// Changes the links at once.
    pub(super) fn change(&self, change: impl FnOnce(&mut MeasureRequest)) -> Result<(), Error> {
        // Held while the client is asked, so that no earlier request follows.
        let mut request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut request);
        mpvpn_api::measure(&self.socket, &request).map(drop)
    }
}

impl Drop for LinkLease {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // A client that is gone has no measured flows.
        let _ = mpvpn_api::measure(&self.socket, &MeasureRequest { end: true, ..MeasureRequest::default() });
    }
}

//! A series of ICMP echo requests to one address.

use std::{
    collections::VecDeque,
    io,
    net::IpAddr,
    ops::ControlFlow,
    time::{Duration, Instant},
};

use mpvpn_os::icmp::EchoSocket;

use super::{Interrupt, POLL_INTERVAL};

/// The target and the number of requests, and their interval.
#[derive(Clone, Debug)]
pub struct PingPlan {
    /// The address.
    pub to: IpAddr,
    /// The device through which requests leave.
    pub device: Option<String>,
    /// Number of requests; `None`: until a signal comes.
    pub count: Option<u64>,
    /// Time between two requests.
    pub interval: Duration,
    /// Time after which a request counts as lost.
    pub timeout: Duration,
    /// Bytes of data in each request.
    pub payload_bytes: usize,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingResult {
    /// Number of the request, from 0.
    pub number: u64,
    /// The sequence number in the message.
    pub sequence: u16,
    /// Its round-trip time; `None` if it is lost.
    pub rtt: Option<Duration>,
}

/// A socket that asks.
#[derive(Debug)]
pub struct Pinger {
    plan: PingPlan,
    socket: EchoSocket,
}

/// A request that waits for its answer.
struct Waiting {
    number: u64,
    sequence: u16,
    sent: Instant,
}

impl Pinger {
    /// Opens the socket.
    ///
    /// # Errors
    /// If this user may not send echo requests, or there is no such device.
    pub fn open(plan: PingPlan) -> io::Result<Self> {
        let socket = EchoSocket::open(plan.to, plan.device.as_deref())?;
        Ok(Self { plan, socket })
    }

    /// The identifier of its requests.
    pub fn identifier(&self) -> u16 {
        self.socket.identifier()
    }

    /// Sends the requests, and calls `each` for each answer and each loss, until it breaks. A signal ends it,
    /// too; requests that wait then count neither as answered nor as lost.
    ///
    /// # Errors
    /// If the kernel refuses to send at all: no route, no permission.
    pub fn run(
        &self,
        interrupt: &Interrupt,
        mut each: impl FnMut(PingResult) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let PingPlan { count, interval, timeout, payload_bytes, .. } = self.plan;
        let mut waiting: VecDeque<Waiting> = VecDeque::new();
        let (mut number, mut next) = (0, Instant::now());
        while !interrupt.is_set() {
            let now = Instant::now();
            let is_more = count.is_none_or(|count| number < count);
            if is_more && now >= next {
                let sequence = number as u16;
                match self.socket.send(sequence, payload_bytes) {
                    Ok(()) => {}
                    Err(error) if number == 0 => return Err(error),
                    // A link that is away for a moment: the request is lost.
                    Err(_) => {}
                }
                waiting.push_back(Waiting { number, sequence, sent: now });
                number += 1;
                next = (next + interval).max(now);
                continue;
            }
            while let Some(Waiting { number, sequence, .. }) =
                waiting.pop_front_if(|oldest| now.saturating_duration_since(oldest.sent) >= timeout)
            {
                if each(PingResult { number, sequence, rtt: None }).is_break() {
                    return Ok(());
                }
            }
            if !is_more && waiting.is_empty() {
                break;
            }
            let expiry = waiting.front().map(|oldest| oldest.sent + timeout);
            let send = is_more.then_some(next);
            let deadline = [expiry, send].into_iter().flatten().fold(now + POLL_INTERVAL, Instant::min);
            // An ICMP error about a request is a loss, which the timeout reports.
            let Ok(Some(reply)) = self.socket.receive(deadline) else { continue };
            let found = waiting.iter().position(|request| request.sequence == reply.sequence);
            if let Some(Waiting { number, sequence, sent }) = found.and_then(|at| waiting.remove(at)) {
                let rtt = Some(reply.at.saturating_duration_since(sent));
                if each(PingResult { number, sequence, rtt }).is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_answered_once_or_lost_once() {
        let plan = PingPlan {
            to: [127, 0, 0, 1].into(),
            device: None,
            count: Some(20),
            interval: Duration::from_millis(2),
            timeout: Duration::from_secs(5),
            payload_bytes: 56,
        };
        let Ok(pinger) = Pinger::open(plan.clone()) else { return eprintln!("skipped: may not ping") };
        let mut numbers = Vec::new();
        let note = |result: PingResult| {
            numbers.push((result.number, result.rtt.is_some()));
            ControlFlow::Continue(())
        };
        pinger.run(&Interrupt::default(), note).unwrap();
        assert_eq!(numbers, (0..20).map(|number| (number, true)).collect::<Vec<_>>());
        // RFC 5737: nobody answers there, and a machine without a route says so.
        let lost = PingPlan {
            to: [192, 0, 2, 77].into(),
            count: Some(2),
            timeout: Duration::from_millis(20),
            ..plan
        };
        let Ok(pinger) = Pinger::open(lost) else { return };
        let mut lost = 0;
        let count = |result: PingResult| {
            lost += u32::from(result.rtt.is_none());
            ControlFlow::Continue(())
        };
        if pinger.run(&Interrupt::default(), count).is_ok() {
            assert_eq!(lost, 2);
        }
    }
}

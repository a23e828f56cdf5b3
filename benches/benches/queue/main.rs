//! Instructions of packet queues and the dispatcher, for 100 packets each.
#![allow(clippy::disallowed_types)] // Edge: what the macros make opens files.
#![allow(missing_docs, unused_qualifications, reason = "what the macros of gungraun make")]
#![allow(clippy::disallowed_methods, reason = "a benchmark needs a moment to count from")]

mod setup;

use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group, main};
use mpvpn_path::Scheduler;

use setup::{Dispatch, FilledQueue};

// Push packets of flows that already have waiting packets.
#[library_benchmark]
#[bench::flows_1(FilledQueue::new(1))]
#[bench::flows_100(FilledQueue::new(100))]
#[bench::flows_10000(FilledQueue::new(10_000))]
fn class_push(mut queue: FilledQueue) -> (usize, FilledQueue) {
    (black_box(&mut queue).push(), queue)
}

// Pop from a queue with 10 200 packets.
#[library_benchmark]
#[bench::flows_1(FilledQueue::new(1))]
#[bench::flows_100(FilledQueue::new(100))]
#[bench::flows_10000(FilledQueue::new(10_000))]
fn class_pop(mut queue: FilledQueue) -> (usize, FilledQueue) {
    (black_box(&mut queue).pop(), queue)
}

// Push into a queue at its limit: each push drops another packet.
#[library_benchmark]
#[bench::flows_1(FilledQueue::full(1))]
#[bench::flows_100(FilledQueue::full(100))]
#[bench::flows_10000(FilledQueue::full(10_000))]
fn class_push_when_full(mut queue: FilledQueue) -> (usize, FilledQueue) {
    (black_box(&mut queue).push(), queue)
}

// Push into the dispatcher and pop again.
#[library_benchmark]
#[bench::auto_ordered_2_paths_flows_1(Dispatch::new(Scheduler::Auto, true, 2, 1))]
#[bench::auto_ordered_2_paths_flows_100(Dispatch::new(Scheduler::Auto, true, 2, 100))]
#[bench::auto_ordered_2_paths_flows_10000(Dispatch::new(Scheduler::Auto, true, 2, 10_000))]
#[bench::auto_ordered_8_paths_flows_100(Dispatch::new(Scheduler::Auto, true, 8, 100))]
#[bench::auto_free_2_paths_flows_100(Dispatch::new(Scheduler::Auto, false, 2, 100))]
#[bench::minrtt_2_paths_flows_100(Dispatch::new(Scheduler::MinRtt, true, 2, 100))]
fn dispatch(mut dispatch: Dispatch) -> (usize, Dispatch) {
    (black_box(&mut dispatch).pass(), dispatch)
}

library_benchmark_group!(name = queue, benchmarks = [class_push, class_pop, class_push_when_full, dispatch]);
main!(library_benchmark_groups = queue);

//! Decodes the list of benchmarks that a benchmark binary sends to the runner.
//!
//! In: the bytes from standard input. Out: name and arguments of each benchmark in order. Features that the
//! benchmarks here do not use (setup of a group, options of one benchmark) are errors.

use gungraun_runner::api::{BenchRunMode, LibraryBenchmark, LibraryBenchmarkGroups};

/// The release of gungraun whose encoding is supported; pinned in the root `Cargo.toml`.
pub const GUNGRAUN_VERSION: &str = "0.20.0";

/// Maximum memory of a decoded list, bytes: about 1000 times the usual size. Without a limit, arbitrary bytes
/// make the decoder allocate all memory.
const MAX_ENCODED_BYTES: usize = 1 << 24;

/// A benchmark that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Benchmark {
    /// Group, function and case, for example `packet::split tcp4_46_packets`.
    pub name: String,
    /// Arguments with which the benchmark binary runs this benchmark alone, once.
    pub arguments: Vec<String>,
}

/// The benchmarks of one binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// All benchmarks.
    pub benchmarks: Vec<Benchmark>,
    /// Arguments of the binary, which are meant for the runner.
    pub args: Vec<String>,
}

impl Plan {
    /// Decodes the bytes of a benchmark binary.
    ///
    /// # Errors
    /// If that is not the encoding of gungraun [`GUNGRAUN_VERSION`], or needs what this runner does not do.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let config = bincode_next::config::legacy().with_limit::<MAX_ENCODED_BYTES>();
        let (groups, _) = bincode_next::serde::decode_from_slice(bytes, config)
            .map_err(|error| format!("the list of benchmarks cannot be read: {error}"))?;
        Self::of(groups)
    }

    fn of(groups: LibraryBenchmarkGroups) -> Result<Self, String> {
        let mut benchmarks = Vec::new();
        if groups.has_setup || groups.has_teardown || groups.config != Default::default() {
            return Err("setup, teardown and options of `main!` are not supported".to_owned());
        }
        for (at, group) in groups.groups.iter().enumerate() {
            if group.has_setup || group.has_teardown || group.config.is_some() {
                let what = "setup, teardown and options of a group are not supported";
                return Err(format!("{}: {what}", group.id));
            }
            for (function_at, function) in group.library_benchmarks.iter().enumerate() {
                benchmarks.extend(cases(&group.id, [at, function_at], function)?);
            }
        }
        Ok(Self { benchmarks, args: groups.command_line_args })
    }
}

/// The cases of one function.
fn cases(group: &str, place: [usize; 2], function: &LibraryBenchmark) -> Result<Vec<Benchmark>, String> {
    let cases = function.benches.iter().enumerate().map(|(at, case)| {
        let mut name = format!("{group}::{}", case.function_name);
        if let Some(id) = &case.id {
            name = format!("{name} {id}");
        }
        if case.iter_count.is_some() || case.config.is_some() || function.config.is_some() {
            return Err(format!("{name}: `iter` and options of a benchmark are not supported"));
        }
        // All arguments have the same length, so that each benchmark starts with the same stack.
        let indices = [place[0], place[1], at].map(|index| format!("{index:05}"));
        let arguments = ["--gungraun-run".to_owned(), BenchRunMode::Default.id()];
        Ok(Benchmark { name, arguments: arguments.into_iter().chain(indices).collect() })
    });
    cases.collect()
}

#[cfg(test)]
mod tests {
    use gungraun_runner::api::{LibraryBenchmarkBench, LibraryBenchmarkGroup, Tool};

    use super::*;

    fn case(function: &str, id: Option<&str>) -> LibraryBenchmarkBench {
        LibraryBenchmarkBench {
            function_name: function.to_owned(),
            id: id.map(str::to_owned),
            ..LibraryBenchmarkBench::default()
        }
    }

    fn groups() -> LibraryBenchmarkGroups {
        let function = |benches| LibraryBenchmark { benches, config: None };
        LibraryBenchmarkGroups {
            command_line_args: vec!["--home=x".to_owned(), "--bench".to_owned()],
            config: Default::default(),
            default_tool: Tool::Callgrind,
            groups: vec![LibraryBenchmarkGroup {
                id: "packet".to_owned(),
                library_benchmarks: vec![
                    function(vec![case("update", None)]),
                    function(vec![case("split", Some("tcp4")), case("split", Some("tcp6"))]),
                ],
                ..LibraryBenchmarkGroup::default()
            }],
            has_setup: false,
            has_teardown: false,
        }
    }

    fn decoded(groups: &LibraryBenchmarkGroups) -> Result<Plan, String> {
        let config = bincode_next::config::legacy();
        Plan::decode(&bincode_next::serde::encode_to_vec(groups, config).expect("it can be encoded"))
    }

    #[test]
    fn each_case_has_a_name_and_the_arguments_that_run_it() {
        let plan = decoded(&groups()).expect("a plan");
        let names: Vec<&str> = plan.benchmarks.iter().map(|benchmark| benchmark.name.as_str()).collect();
        assert_eq!(names, ["packet::update", "packet::split tcp4", "packet::split tcp6"]);
        assert_eq!(plan.benchmarks[2].arguments, ["--gungraun-run", "d:d:000000", "00000", "00001", "00001"]);
        assert_eq!(plan.args, ["--home=x", "--bench"]);
    }

    #[test]
    fn what_would_be_ignored_is_refused() {
        let mut with_setup = groups();
        with_setup.groups[0].has_setup = true;
        let mut with_iterator = groups();
        with_iterator.groups[0].library_benchmarks[0].benches[0].iter_count = Some(2);
        let mut with_options = groups();
        with_options.groups[0].library_benchmarks[0].config = Some(Default::default());
        for refused in [with_setup, with_iterator, with_options] {
            let error = decoded(&refused).expect_err("it needs what the runner does not do");
            assert!(error.starts_with("packet") && error.ends_with("not supported"), "{error}");
        }
    }

    #[test]
    fn bytes_of_something_else_are_an_error() {
        assert!(Plan::decode(b"").is_err());
        assert!(Plan::decode(&[0xff; 64]).is_err());
    }
}

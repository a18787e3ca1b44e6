//! `cargo xtask test`: every test of the project, with its prerequisites.

mod failures;

use std::collections::VecDeque;
use std::io::{Read, pipe};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use failures::TestFailure;

use crate::codegen::{cargo_metadata, target_dir};
use testbed::cluster::prepare::{self, NODE_PARTS, Part};
use testbed::cluster::{CONTAINERD_VERSIONS, Cache, kubernetes};

/// The feature that makes cargo build tests of real components.
const CLUSTER_FEATURES: &str = "kruise-tests/cluster-tests,testbed/cluster-tests,xtask/cluster-tests";
/// The feature that makes cargo also build tests that run the Go implementation.
const PEER_FEATURE: &str = "peer-tests";
/// Targets that run in parallel. Beds mostly wait, so two of them keep two cores busy.
const MAX_PARALLEL_JOBS: usize = 2;
/// Tests of one target that run in parallel if they start real components.
const CLUSTER_THREADS: u8 = 4;

/// Options of `cargo xtask test`.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Run only these test targets (files of `tests/` without `.rs`), or of one only a module or test
    #[arg(long, value_name = "NAME[::MODULE]", num_args = 1..)]
    only: Vec<Selection>,
    /// Folder of the Go implementation (its `run.sh` and binaries), for the tests that run it together with ours
    #[arg(long, value_name = "DIR")]
    peer: Option<PathBuf>,
    /// Disturb what is disturbed at random ten times as often, and show what these tests say
    #[arg(long)]
    soak: bool,
}

/// What `--only` names: a test target, or those tests of it whose path contains the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Selection {
    target: String,
    filter: Option<String>,
}

/// How cargo is called.
struct Cargo {
    /// Kubernetes release of the beds.
    kubernetes: &'static str,
    /// Folder of the Go implementation.
    peer: Option<PathBuf>,
    /// Whether tests run in their long form.
    soak: bool,
    /// Folder into which our programs are built.
    programs: PathBuf,
}

/// A test target: its name, whether it starts real components, and whether it also needs the Go implementation.
#[derive(Debug, PartialEq, Eq)]
struct TestTarget {
    name: String,
    cluster: bool,
    peer: bool,
}

/// One run of `cargo test`.
struct TestJob {
    name: String,
    args: Vec<String>,
    threads: u8,
    /// Only tests whose path contains one of these; all of them if empty.
    filters: Vec<String>,
}

/// Result of a run of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TestCounts {
    passed: u32,
    failed: u32,
    ignored: u32,
}

/// One line of the summary.
struct SummaryRow {
    name: String,
    count: TestCounts,
    seconds: f64,
    ok: bool,
    failures: Vec<TestFailure>,
}

/// Installs what all tests need: build tools, the parts of the bed, three series of containerd.
pub fn prepare_all(cache: &Cache) -> Result<()> {
    prepare::ensure(cache, &[Part::Protoc])?;
    prepare::ensure(cache, &NODE_PARTS)?;
    prepare::ensure(cache, &[Part::Helm, Part::Prometheus])?;
    prepare::ensure(
        cache,
        &CONTAINERD_VERSIONS.map(|(suite, _)| Part::Containerd(suite)),
    )
}

/// Runs the tests and fails when one does.
pub fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    prepare_all(&Cache::open()?)?;
    let peer = options.peer.as_deref().map(Path::canonicalize).transpose();
    let metadata = cargo_metadata()?;
    let cargo = Cargo {
        kubernetes: kubernetes::release()?,
        peer: peer.context("--peer: no such folder")?,
        soak: options.soak,
        programs: target_dir(&metadata)?.join("debug"),
    };
    let targets = select_targets(&metadata, &options.only, cargo.peer.is_some())?;
    let mut rows = vec![build(&cargo, &targets, options.only.is_empty())?];
    let mut jobs: VecDeque<TestJob> = targets.iter().map(|t| t.to_job(&options.only)).collect();
    if options.only.is_empty() {
        jobs.push_back(TestJob::new("libraries and programs", &["--lib", "--bins"], 2));
        jobs.push_back(TestJob::new("examples in the documentation", &["--doc"], 2));
    }
    let mut finished = run_jobs(&cargo, jobs)?;
    finished.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    rows.extend(finished);
    print_summary(&rows, start.elapsed().as_secs_f64())
}

/// The targets to run; those of the Go implementation only if its folder is given.
fn select_targets(metadata: &serde_json::Value, only: &[Selection], peer: bool) -> Result<Vec<TestTarget>> {
    let all = parse_targets(metadata).context("cargo metadata has another form")?;
    if let Some(unknown) = only.iter().find(|s| !all.iter().any(|t| t.name == s.target)) {
        let names: Vec<&str> = all.iter().map(|t| t.name.as_str()).collect();
        bail!(
            "--only {}: no such test target; there are: {}",
            unknown.target,
            names.join(", ")
        );
    }
    let selected = |t: &TestTarget| only.is_empty() || only.iter().any(|s| s.target == t.name);
    let (mut targets, skipped): (Vec<_>, Vec<_>) =
        all.into_iter().filter(selected).partition(|t| peer || !t.peer);
    for TestTarget { name, .. } in skipped {
        if !only.is_empty() {
            bail!("--only {name}: it runs the Go implementation; say with --peer where that is");
        }
        eprintln!(
            "Not tested: {name}, because it runs the Go implementation and no --peer says where that is"
        );
    }
    // Long-running targets start first.
    targets.sort_by_key(|t| !t.cluster);
    Ok(targets)
}

fn parse_targets(metadata: &serde_json::Value) -> Option<Vec<TestTarget>> {
    let mut targets = Vec::new();
    for package in metadata["packages"].as_array()? {
        for target in package["targets"].as_array()? {
            if !target["kind"].as_array()?.iter().any(|k| k == "test") {
                continue;
            }
            let features = target["required-features"].as_array();
            let needs = |feature: &str| features.is_some_and(|f| f.iter().any(|f| f == feature));
            targets.push(TestTarget {
                name: target["name"].as_str()?.to_owned(),
                cluster: needs("cluster-tests") || needs(PEER_FEATURE),
                peer: needs(PEER_FEATURE),
            });
        }
    }
    Some(targets)
}

impl TestTarget {
    fn to_job(&self, only: &[Selection]) -> TestJob {
        let threads = if self.cluster { CLUSTER_THREADS } else { 2 };
        let mut job = TestJob::new(&self.name, &["--test", &self.name], threads);
        let of_this = || only.iter().filter(|s| s.target == self.name);
        // Named once without a module, all of it runs.
        if of_this().all(|s| s.filter.is_some()) {
            job.filters = of_this().filter_map(|s| s.filter.clone()).collect();
        }
        job
    }
}

impl From<&str> for Selection {
    fn from(text: &str) -> Self {
        let (target, filter) = text
            .split_once("::")
            .map_or((text, None), |(target, filter)| (target, Some(filter.to_owned())));
        Self {
            target: target.to_owned(),
            filter,
        }
    }
}

impl TestJob {
    fn new(name: &str, args: &[&str], threads: u8) -> Self {
        Self {
            name: name.to_owned(),
            args: args.iter().map(|a| (*a).to_owned()).collect(),
            threads,
            filters: Vec::new(),
        }
    }

    /// Runs it to its end, prints its output in one piece, and counts.
    fn run(&self, cargo: &Cargo) -> Result<SummaryRow> {
        eprintln!("... {}", self.name);
        let start = Instant::now();
        let (mut reader, writer) = pipe()?;
        let mut command = cargo.command("test", &self.args);
        command.args([
            "--no-fail-fast",
            "--",
            &format!("--test-threads={}", self.threads),
        ]);
        command.args(&self.filters);
        if cargo.soak {
            command.arg("--show-output").env("KRUISE_SOAK", "1");
        }
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        let mut cargo_process = command.spawn().context("cannot start cargo")?;
        // It holds a writer of the pipe, too, without whose close the read never ends.
        drop(command);
        let mut text = Vec::new();
        reader.read_to_end(&mut text)?;
        let text = String::from_utf8_lossy(&text);
        let ok = cargo_process.wait()?.success();
        let mut row = SummaryRow {
            name: self.name.clone(),
            count: TestCounts::default(),
            seconds: start.elapsed().as_secs_f64(),
            ok,
            failures: failures::parse_failures(&self.name, &text, ok),
        };
        text.lines()
            .filter_map(parse_result_line)
            .for_each(|more| row.count.add(more));
        if ok && row.count.passed == 0 && !self.filters.is_empty() {
            bail!(
                "--only {}::{}: no such test",
                self.name,
                self.filters.join(" or ")
            );
        }
        println!("==> {}, {:.1} s\n{}\n", row.name, row.seconds, text.trim());
        Ok(row)
    }
}

impl Cargo {
    fn command(&self, verb: &str, args: &[String]) -> Command {
        let mut command = Command::new("cargo");
        command.args([verb, "--quiet", "--workspace", "--features", CLUSTER_FEATURES]);
        if let Some(dir) = &self.peer {
            command.args(["--features", &format!("kruise-tests/{PEER_FEATURE}")]);
            command.env("KRUISE_PEER", dir);
        }
        command.args(args);
        // A panic prints its location; the frames above it would only hide other output.
        command.env("RUST_BACKTRACE", "0");
        command.env(kubernetes::RELEASE_ENV_VAR, self.kubernetes);
        command.env("KRUISE_PROGRAMS", &self.programs);
        command
    }
}

/// Compiles everything that will run, including our programs, so that the tests' durations do not include it.
fn build(cargo: &Cargo, targets: &[TestTarget], all_targets: bool) -> Result<SummaryRow> {
    eprintln!("... build");
    let start = Instant::now();
    let mut args = vec!["--bins".to_owned()];
    if all_targets {
        args.push("--tests".to_owned());
    } else {
        args.extend(targets.iter().flat_map(|t| ["--test".to_owned(), t.name.clone()]));
    }
    if !cargo
        .command("build", &args)
        .status()
        .context("cannot start cargo")?
        .success()
    {
        bail!("the tests do not compile");
    }
    Ok(SummaryRow {
        name: "build".into(),
        count: TestCounts::default(),
        seconds: start.elapsed().as_secs_f64(),
        ok: true,
        failures: Vec::new(),
    })
}

/// Runs the jobs, some in parallel, in the given order.
fn run_jobs(cargo: &Cargo, jobs: VecDeque<TestJob>) -> Result<Vec<SummaryRow>> {
    let jobs = Mutex::new(jobs);
    let next_job = || jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let run_queue = || -> Result<Vec<SummaryRow>> {
        let mut rows = Vec::new();
        while let Some(job) = next_job() {
            rows.push(job.run(cargo)?);
        }
        Ok(rows)
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..MAX_PARALLEL_JOBS).map(|_| scope.spawn(run_queue)).collect();
        let mut rows = Vec::new();
        for worker in workers {
            let worker_rows = worker
                .join()
                .map_err(|_| anyhow::anyhow!("a worker ended early"))?;
            rows.extend(worker_rows?);
        }
        Ok(rows)
    })
}

/// Reads `test result: ok. 3 passed; 0 failed; 0 ignored; …`.
fn parse_result_line(line: &str) -> Option<TestCounts> {
    let numbers = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count_of = |word: &str| {
        let part = numbers.split("; ").find(|p| p.ends_with(word))?;
        part.split(' ').next()?.parse().ok()
    };
    Some(TestCounts {
        passed: count_of("passed")?,
        failed: count_of("failed")?,
        ignored: count_of("ignored")?,
    })
}

impl TestCounts {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

fn print_summary(rows: &[SummaryRow], seconds: f64) -> Result<()> {
    let mut total = TestCounts::default();
    println!("{:<40} {:>7} {:>7} {:>8}", "tests", "passed", "failed", "seconds");
    for row in rows {
        let TestCounts { passed, failed, .. } = row.count;
        total.add(row.count);
        let note = if row.ok || failed > 0 {
            ""
        } else {
            "  did not run to its end"
        };
        println!(
            "{:<40} {passed:>7} {failed:>7} {:>8.1}{note}",
            row.name, row.seconds
        );
    }
    let ok = rows.iter().all(|r| r.ok);
    let TestCounts {
        passed,
        failed,
        ignored,
    } = total;
    println!(
        "\ntest result: {}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out; \
         finished in {seconds:.2}s",
        if ok { "ok" } else { "FAILED" }
    );
    if !ok {
        // Printed last: often only the end of a run's output is visible.
        let failures: Vec<&TestFailure> = rows.iter().flat_map(|r| &r.failures).collect();
        println!("\n{}", failures::report(&failures));
        bail!("tests failed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn cargo_result_line_is_parsed() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(
            parse_result_line(line),
            Some(TestCounts {
                passed: 12,
                failed: 3,
                ignored: 1
            })
        );
        assert_eq!(parse_result_line("running 3 tests"), None);
    }

    #[test]
    fn part_of_a_target_is_selected() {
        let target = TestTarget {
            name: "api".into(),
            cluster: true,
            peer: false,
        };
        let filters = |only: &[&str]| {
            let only: Vec<Selection> = only.iter().map(|text| Selection::from(*text)).collect();
            target.to_job(&only).filters
        };
        assert_eq!(filters(&[]), [""; 0]);
        assert_eq!(filters(&["api", "other"]), [""; 0]);
        assert_eq!(filters(&["api::one", "other::two", "api::a::b"]), ["one", "a::b"]);
        assert_eq!(filters(&["api::one", "api"]), [""; 0]);
    }

    #[test]
    fn targets_are_classified_by_required_features() {
        let metadata = serde_json::json!({ "packages": [{ "targets": [
            { "kind": ["lib"], "name": "p" },
            { "kind": ["test"], "name": "plain" },
            { "kind": ["test"], "name": "real", "required-features": ["cluster-tests"] },
            { "kind": ["test"], "name": "both", "required-features": ["peer-tests"] },
        ]}]});
        let found = parse_targets(&metadata).unwrap();
        let classified: Vec<_> = found
            .iter()
            .map(|t| (t.name.as_str(), t.cluster, t.peer))
            .collect();
        let expected = [
            ("plain", false, false),
            ("real", true, false),
            ("both", true, true),
        ];
        assert_eq!(classified, expected);
    }
}

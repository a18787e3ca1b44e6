//! `cargo xtask test`: every test of the project, with what they need.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::cluster::prepare::{self, NODE, Part};
use crate::cluster::{CONTAINERDS, Cache, finish};

/// The feature that lets cargo build tests of real components.
const FEATURES: &str = "kruise-rs/cluster-tests,xtask/cluster-tests";

/// Options of `cargo xtask test`.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Run only these test targets (files of `tests/` without `.rs`)
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
}

/// A test target: its name and whether it starts real components.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    name: String,
    cluster: bool,
}

/// What a run of tests came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u32,
    failed: u32,
    ignored: u32,
}

/// One line of the summary.
struct Row {
    name: String,
    count: Count,
    seconds: f64,
    ok: bool,
}

/// Gets what all tests need: compilers' tools, the parts of the bed, three series of containerd.
pub fn prepare_all(cache: &Cache) -> Result<()> {
    prepare::ensure(cache, &[Part::Protoc])?;
    prepare::ensure(cache, &NODE)?;
    prepare::ensure(cache, &CONTAINERDS.map(|(suite, _)| Part::Containerd(suite)))
}

/// Runs the tests and fails when one does.
pub fn run(options: &Options) -> Result<()> {
    let start = Instant::now();
    prepare_all(&Cache::open()?)?;
    let targets = targets(&options.only)?;
    let mut rows = Vec::new();
    if options.only.is_empty() {
        rows.push(cargo_test(
            "libraries and programs",
            &["--workspace", "--lib", "--bins"],
            2,
        )?);
        rows.push(cargo_test(
            "examples in the documentation",
            &["--workspace", "--doc"],
            2,
        )?);
    }
    // Real components have two cores to share: one test at a time there, and the plain ones first.
    for cluster in [false, true] {
        for target in targets.iter().filter(|t| t.cluster == cluster) {
            let args = ["--workspace", "--test", &target.name];
            rows.push(cargo_test(&target.name, &args, if cluster { 1 } else { 2 })?);
        }
    }
    summary(&rows, start.elapsed().as_secs_f64())
}

fn targets(only: &[String]) -> Result<Vec<Target>> {
    let text = finish(Command::new("cargo").args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let all = parse_targets(&serde_json::from_str(&text)?).context("cargo metadata has another form")?;
    if let Some(unknown) = only.iter().find(|n| !all.iter().any(|t| t.name == **n)) {
        let names: Vec<&str> = all.iter().map(|t| t.name.as_str()).collect();
        bail!(
            "--only {unknown}: no such test target; there are: {}",
            names.join(", ")
        );
    }
    Ok(all
        .into_iter()
        .filter(|t| only.is_empty() || only.contains(&t.name))
        .collect())
}

fn parse_targets(metadata: &serde_json::Value) -> Option<Vec<Target>> {
    let mut targets = Vec::new();
    for package in metadata["packages"].as_array()? {
        for target in package["targets"].as_array()? {
            if !target["kind"].as_array()?.iter().any(|k| k == "test") {
                continue;
            }
            let features = target["required-features"].as_array();
            targets.push(Target {
                name: target["name"].as_str()?.to_owned(),
                cluster: features.is_some_and(|f| f.iter().any(|f| f == "cluster-tests")),
            });
        }
    }
    Some(targets)
}

/// Runs `cargo test`, shows its output as it comes, and counts.
fn cargo_test(name: &str, args: &[&str], threads: u8) -> Result<Row> {
    eprintln!("==> Test {name}");
    let start = Instant::now();
    let mut command = Command::new("cargo");
    command
        .args(["test", "--quiet", "--no-fail-fast", "--features", FEATURES])
        .args(args);
    command.args(["--", &format!("--test-threads={threads}")]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let mut count = Count::default();
    for line in BufReader::new(child.stdout.take().context("no output")?).lines() {
        let line = line?;
        if let Some(more) = parse_result(&line) {
            count.add(more);
        }
        println!("{line}");
    }
    let ok = child.wait()?.success();
    Ok(Row {
        name: name.to_owned(),
        count,
        seconds: start.elapsed().as_secs_f64(),
        ok,
    })
}

/// Reads `test result: ok. 3 passed; 0 failed; 0 ignored; …`.
fn parse_result(line: &str) -> Option<Count> {
    let numbers = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let number = |word: &str| {
        let part = numbers.split("; ").find(|p| p.ends_with(word))?;
        part.split(' ').next()?.parse().ok()
    };
    Some(Count {
        passed: number("passed")?,
        failed: number("failed")?,
        ignored: number("ignored")?,
    })
}

impl Count {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

fn summary(rows: &[Row], seconds: f64) -> Result<()> {
    let mut total = Count::default();
    println!(
        "\n{:<40} {:>7} {:>7} {:>8}",
        "tests", "passed", "failed", "seconds"
    );
    for row in rows {
        total.add(row.count);
        let note = if row.ok || row.count.failed > 0 {
            ""
        } else {
            "  did not run to its end"
        };
        println!(
            "{:<40} {:>7} {:>7} {:>8.1}{note}",
            row.name, row.count.passed, row.count.failed, row.seconds
        );
    }
    let ok = rows.iter().all(|r| r.ok);
    let Count {
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
        bail!("tests failed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn cargos_result_line_is_read() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(
            parse_result(line),
            Some(Count {
                passed: 12,
                failed: 3,
                ignored: 1
            })
        );
        assert_eq!(parse_result("running 3 tests"), None);
    }

    #[test]
    fn targets_are_told_apart_by_the_feature_they_require() {
        let metadata = serde_json::json!({ "packages": [{ "targets": [
            { "kind": ["lib"], "name": "p" },
            { "kind": ["test"], "name": "plain" },
            { "kind": ["test"], "name": "real", "required-features": ["cluster-tests"] },
        ]}]});
        let found = parse_targets(&metadata).unwrap();
        let told: Vec<_> = found.iter().map(|t| (t.name.as_str(), t.cluster)).collect();
        assert_eq!(told, [("plain", false), ("real", true)]);
    }
}

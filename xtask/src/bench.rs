//! `cargo xtask bench`: runs the benchmarks, with `--peer` side by side with the Go implementation.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::codegen::repository_dir;
use crate::image::Binaries;
use testbed::cluster::prepare::{self, NODE_PARTS, Part};
use testbed::cluster::{Cache, kubernetes};

/// Options of `cargo xtask bench`.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Folder of the Go implementation (its `run.sh` and binaries)
    #[arg(long, value_name = "DIR")]
    peer: Option<PathBuf>,
    /// The page whose section with the table is replaced; its other sections are kept
    #[arg(long, value_name = "FILE", default_value = "docs/operations/benchmarks.md")]
    out: PathBuf,
    /// Only this group of rows, may be repeated; the table is printed and not written
    #[arg(long, value_name = "GROUP", value_parser = PossibleValuesParser::new([&SIDE_BY_SIDE_GROUPS[..], &AT_SIZE_GROUPS[..]].concat()))]
    only: Vec<String>,
    /// Only the groups many-…: ours alone, at sizes that need minutes
    #[arg(long, conflicts_with_all = ["only", "peer"])]
    at_size: bool,
}

/// Groups of rows.
const SIDE_BY_SIDE_GROUPS: [&str; 11] = [
    "memory",
    "pull",
    "recreate",
    "probes",
    "in-place",
    "ahead",
    "fan-out",
    "clone-set",
    "sidecar-in-place",
    "inject",
    "sidecar-set",
];
/// Groups of rows for our programs only, each on a cluster of its own.
const AT_SIZE_GROUPS: [&str; 7] = [
    "many-pods-of-node",
    "many-nodes",
    "many-tags",
    "many-pods",
    "many-sets",
    "many-sidecars",
    "many-sidecar-sets",
];

impl Options {
    /// # Errors
    /// If the selected groups have no table in common.
    fn validate(&self) -> Result<()> {
        let is_side_by_side = |group: &String| SIDE_BY_SIDE_GROUPS.contains(&group.as_str());
        ensure!(
            self.only.iter().all(is_side_by_side)
                || !(self.peer.is_some() || self.only.iter().any(is_side_by_side)),
            "--only: {} are of ours alone, on clusters of their own; measure the other groups apart, and leave \
             --peer out",
            AT_SIZE_GROUPS.join(", ")
        );
        Ok(())
    }

    fn selected_groups(&self) -> Vec<&str> {
        match (&self.only[..], self.at_size) {
            ([], false) => SIDE_BY_SIDE_GROUPS.to_vec(),
            ([], true) => AT_SIZE_GROUPS.to_vec(),
            (only, _) => only.iter().map(String::as_str).collect(),
        }
    }
}

/// Builds the programs and runs the measurements.
pub fn run(options: &Options) -> Result<()> {
    options.validate()?;
    let cache = Cache::open()?;
    prepare::ensure(&cache, &NODE_PARTS)?;
    prepare::ensure(&cache, &[Part::Kwok])?;
    let binaries = Binaries::build(|line| eprintln!("{line}"))?;
    let mut cargo = Command::new("cargo");
    cargo.args([
        "bench",
        "--quiet",
        "--features",
        "kruise-tests/cluster-tests",
        "--bench",
        "figures",
    ]);
    cargo
        .current_dir(repository_dir())
        .env("KRUISE_BENCH_BINARIES", binaries.dir())
        .env(kubernetes::RELEASE_ENV_VAR, cache.release());
    cargo.env("KRUISE_BENCH_GROUPS", options.selected_groups().join(","));
    if options.only.is_empty() {
        cargo.env("KRUISE_BENCH_OUT", std::path::absolute(&options.out)?);
    }
    if let Some(peer) = &options.peer {
        let dir = peer
            .canonicalize()
            .with_context(|| format!("--peer {}", peer.display()))?;
        cargo.env("KRUISE_BENCH_PEER", dir);
    }
    if !cargo.status().context("cannot start cargo")?.success() {
        bail!("not everything was measured; what was not is named above");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn options(args: &[&str]) -> Options {
        Cli::try_parse_from([&["bench"], args].concat()).unwrap().options
    }

    #[test]
    fn at_size_groups_cannot_be_mixed_with_others() {
        for (args, groups) in [
            (&[][..], &SIDE_BY_SIDE_GROUPS[..]),
            (&["--at-size"], &AT_SIZE_GROUPS),
            (&["--only", "pull", "--only", "ahead"], &["pull", "ahead"]),
            (&["--only", "many-pods"], &["many-pods"]),
        ] {
            let options = options(args);
            options.validate().unwrap();
            assert_eq!(options.selected_groups(), groups);
        }
        for wrong in [["--only", "pull"], ["--peer", "."]] {
            let invalid = options(&[&wrong[..], &["--only", "many-pods"]].concat());
            assert!(invalid.validate().unwrap_err().to_string().contains("many-pods"));
        }
    }
}

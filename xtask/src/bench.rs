//! `cargo xtask bench`: measures, with `--peer` side by side with the Go implementation.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::cluster::Cache;
use crate::codegen::repository;
use crate::image::Binaries;
use crate::parts::prepare::{self, NODE, Part};

/// Options of `cargo xtask bench`.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Folder of the Go implementation (its `run.sh` and binaries)
    #[arg(long, value_name = "DIR")]
    peer: Option<PathBuf>,
    /// Where the table goes; its section "Notes" is kept
    #[arg(long, value_name = "FILE", default_value = "docs/benchmarks.md")]
    out: PathBuf,
    /// Only this group of rows; nothing is written then
    #[arg(long, value_parser = PossibleValuesParser::new([&BESIDE[..], &AT_SIZE[..]].concat()))]
    only: Vec<String>,
    /// The groups that take ours alone to sizes that need minutes, instead of the others
    #[arg(long, conflicts_with = "only")]
    at_size: bool,
}

/// Groups of rows.
const BESIDE: [&str; 7] = [
    "memory",
    "pull",
    "recreate",
    "in-place",
    "ahead",
    "fan-out",
    "clone-set",
];
/// Groups of rows of ours alone, each on a cluster of its own.
const AT_SIZE: [&str; 3] = ["many-nodes", "many-pods", "many-sets"];

impl Options {
    fn groups(&self) -> Vec<&str> {
        match (&self.only[..], self.at_size) {
            ([], false) => BESIDE.to_vec(),
            ([], true) => AT_SIZE.to_vec(),
            (only, _) => only.iter().map(String::as_str).collect(),
        }
    }
}

/// Builds the programs and runs the measurements.
pub fn run(options: &Options) -> Result<()> {
    let cache = Cache::open()?;
    prepare::ensure(&cache, &NODE)?;
    prepare::ensure(&cache, &[Part::Kwok])?;
    let binaries = Binaries::build()?;
    let mut cargo = Command::new("cargo");
    cargo.args([
        "bench",
        "--quiet",
        "--features",
        "kruise-rs/cluster-tests",
        "--bench",
        "figures",
    ]);
    cargo
        .current_dir(repository())
        .env("KRUISE_BENCH_BINARIES", binaries.dir());
    cargo.env("KRUISE_BENCH_GROUPS", options.groups().join(","));
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
        bail!("the measurements failed");
    }
    Ok(())
}

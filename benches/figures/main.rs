//! Measures the programs on a real node, side by side with the Go implementation where its folder is given.
//!
//! `cargo xtask bench [--peer DIR]` runs this; every figure comes from the same machine in the same run.

mod cluster;
mod fan_out;
mod footprint;
mod pull;
mod recreate;
mod report;
mod side;

use std::path::PathBuf;

use anyhow::{Context, Result};
use report::{Figures, Report};
use side::{Side, Which};

fn main() -> Result<()> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let binaries = variable("KRUISE_BENCH_BINARIES").context("run this by 'cargo xtask bench'")?;
    let peer = variable("KRUISE_BENCH_PEER");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let ours = runtime.block_on(measure(&Which::Ours(binaries)))?;
    let mut report = Report { ours, peer: None };
    match peer {
        Some(dir) => report.peer = Some(runtime.block_on(measure(&Which::Peer(dir)))?),
        None => eprintln!("The Go implementation is not measured: no --peer given."),
    }
    print!("{}", report.table());
    if let Some(file) = variable("KRUISE_BENCH_OUT") {
        report.write(&file)?;
        eprintln!("written: {}", file.display());
    }
    Ok(())
}

/// The rows of one implementation, on a cluster of its own; `KRUISE_BENCH_ONLY` names one group of them.
async fn measure(which: &Which) -> Result<Figures> {
    let name = which.name();
    let only = std::env::var("KRUISE_BENCH_ONLY").ok();
    let due = |group: &str| {
        let due = only.as_deref().is_none_or(|only| only == group);
        if due {
            eprintln!("==> {name}: {group}");
        }
        due
    };
    let mut figures = Figures::default();
    eprintln!("==> {name}: a node and both programs start");
    let side = Side::start(which).await?;
    footprint::start(&side, &mut figures)?;
    if due("memory") {
        footprint::idle(&side, &mut figures).await?;
    }
    if due("pull") {
        pull::measure(&side, &mut figures).await?;
    }
    if due("recreate") {
        recreate::measure(&side, &mut figures).await?;
    }
    if due("fan-out") {
        fan_out::measure(&side, &mut figures).await?;
    }
    Ok(figures)
}

//! Measures the programs on a real node, side by side with the Go implementation where its folder is given.
//!
//! `cargo xtask bench [--peer DIR]` runs this; every figure comes from the same machine in the same run.

mod bare;
mod clone_set;
mod cluster;
mod fan_out;
mod footprint;
mod in_place;
mod kwok;
mod many;
mod pull;
mod recreate;
mod report;
mod rows;
mod side;

use std::path::PathBuf;

use anyhow::{Context, Result};
use report::Report;
use rows::Figures;
use side::{Side, Which};

/// Nodes and Pods of the rows that are measured side by side.
const THOUSAND: usize = 1000;

fn main() -> Result<()> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let binaries = variable("KRUISE_BENCH_BINARIES").context("run this by 'cargo xtask bench'")?;
    let groups = std::env::var("KRUISE_BENCH_GROUPS").unwrap_or_default();
    let groups: Vec<&str> = groups.split(',').collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let ours = Which::Ours(binaries);
    let report = if groups.iter().any(|group| group.starts_with("many-")) {
        Report::Alone(Box::new(runtime.block_on(alone(&ours, &groups))?))
    } else {
        let figures = runtime.block_on(beside(&ours, &groups))?;
        let peer = match variable("KRUISE_BENCH_PEER") {
            Some(dir) => Some(runtime.block_on(beside(&Which::Peer(dir), &groups))?),
            None => {
                eprintln!("The Go implementation is not measured: no --peer given.");
                None
            }
        };
        Report::Beside(Box::new((figures, peer)))
    };
    print!("{}", report.table());
    if let Some(file) = variable("KRUISE_BENCH_OUT") {
        report.write(&file)?;
        eprintln!("written: {}", file.display());
    }
    Ok(())
}

/// These groups of rows of one implementation, on a cluster of its own.
async fn beside(which: &Which, groups: &[&str]) -> Result<Figures> {
    let name = which.name();
    let due = |group: &str| {
        let due = groups.contains(&group);
        if due {
            eprintln!("==> {name}: {group}");
        }
        due
    };
    let mut figures = Figures::default();
    eprintln!("==> {name}: a node and both programs start");
    let mut side = Side::start(which).await?;
    footprint::start(&side, &mut figures)?;
    if due("memory") {
        tell(footprint::idle(&side, &mut figures).await);
    }
    if due("pull") {
        tell(pull::measure(&side, &mut figures).await);
    }
    if due("recreate") {
        tell(recreate::measure(&side, &mut figures).await);
    }
    if due("in-place") {
        figures.in_place = tell(in_place::restarts(&side).await);
    }
    if due("ahead") {
        figures.rollout = tell(in_place::rollout(&side, false).await);
        figures.rollout_ahead = tell(in_place::rollout(&side, true).await);
    }
    if due("fan-out") {
        figures.fan_out = tell(fan_out::measure(&mut side, THOUSAND).await);
    }
    if due("clone-set") {
        figures.clone_set = tell(clone_set::measure(&mut side, THOUSAND, THOUSAND).await);
    }
    Ok(figures)
}

/// What was measured. What could not be is told, and does not cost the other rows.
fn tell<T>(measured: Result<T>) -> Option<T> {
    measured
        .inspect_err(|error| eprintln!("could not be measured: {error:#}"))
        .ok()
}

/// These groups of rows at sizes of their own, each on a cluster of its own.
async fn alone(which: &Which, groups: &[&str]) -> Result<Figures> {
    let mut figures = Figures::default();
    for group in groups {
        eprintln!("==> {group}");
        let mut side = Side::start(which).await?;
        match *group {
            "many-nodes" => figures.many_nodes = tell(many::nodes(&mut side).await),
            "many-pods" => figures.many_pods = tell(many::pods(&mut side).await),
            "many-sets" => figures.many_sets = tell(many::sets(&mut side).await),
            _ => anyhow::bail!("{group} is not measured at size"),
        }
    }
    Ok(figures)
}

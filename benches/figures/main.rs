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
mod rollout;
mod rows;
mod side;
mod usage;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
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
    let mut missing = Missing::default();
    let report = if groups.iter().any(|group| group.starts_with("many-")) {
        Report::Alone(Box::new(runtime.block_on(alone(&ours, &groups, &mut missing))?))
    } else {
        let figures = runtime.block_on(beside(&ours, &groups, &mut missing))?;
        let peer = match variable("KRUISE_BENCH_PEER") {
            Some(dir) => {
                let peer = Which::Peer(dir);
                let measured = runtime.block_on(beside(&peer, &groups, &mut missing));
                missing.tell(peer.name(), measured)
            }
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
    missing.into_result()
}

/// What could not be measured, in words.
#[derive(Default)]
struct Missing(BTreeSet<String>);

impl Missing {
    fn into_result(self) -> Result<()> {
        let words: Vec<String> = self.0.into_iter().collect();
        ensure!(words.is_empty(), "could not be measured: {}", words.join(", "));
        Ok(())
    }

    /// What was measured. What could not be is told and noted, and does not cost the other rows.
    fn tell<T>(&mut self, what: &str, measured: Result<T>) -> Option<T> {
        measured
            .inspect_err(|error| {
                eprintln!("{what} could not be measured: {error:#}");
                self.0.insert(what.to_owned());
            })
            .ok()
    }
}

/// These groups of rows of one implementation, on a cluster of its own.
async fn beside(which: &Which, groups: &[&str], missing: &mut Missing) -> Result<Figures> {
    let name = which.name();
    let due = |group: &str| {
        groups.contains(&group).then(|| {
            let what = format!("{name}: {group}");
            eprintln!("==> {what}");
            what
        })
    };
    let mut figures = Figures::default();
    eprintln!("==> {name}: a node and both programs start");
    let mut side = Side::start(which).await?;
    footprint::start(&side, &mut figures)?;
    if let Some(what) = due("memory") {
        missing.tell(&what, footprint::idle(&side, &mut figures).await);
    }
    if let Some(what) = due("pull") {
        missing.tell(&what, pull::measure(&side, &mut figures).await);
    }
    if let Some(what) = due("recreate") {
        missing.tell(&what, recreate::measure(&side, &mut figures).await);
    }
    if let Some(what) = due("in-place") {
        figures.in_place = missing.tell(&what, in_place::restarts(&side).await);
    }
    if let Some(what) = due("ahead") {
        figures.rollout = missing.tell(&what, rollout::measure(&side, false).await);
        figures.rollout_ahead = missing.tell(&what, rollout::measure(&side, true).await);
    }
    if let Some(what) = due("fan-out") {
        figures.fan_out = missing.tell(&what, fan_out::measure(&mut side, THOUSAND).await);
    }
    if let Some(what) = due("clone-set") {
        figures.clone_set = missing.tell(&what, clone_set::measure(&mut side, THOUSAND, THOUSAND).await);
    }
    Ok(figures)
}

/// These groups of rows at sizes of their own, each on a cluster of its own.
async fn alone(which: &Which, groups: &[&str], missing: &mut Missing) -> Result<Figures> {
    let mut figures = Figures::default();
    for group in groups {
        eprintln!("==> {group}");
        let Some(mut side) = missing.tell(group, Side::start(which).await) else {
            continue;
        };
        match *group {
            "many-nodes" => figures.many_nodes = missing.tell(group, many::nodes(&mut side).await),
            "many-pods" => figures.many_pods = missing.tell(group, many::pods(&mut side).await),
            "many-sets" => figures.many_sets = missing.tell(group, many::sets(&mut side).await),
            _ => anyhow::bail!("{group} is not measured at size"),
        }
    }
    Ok(figures)
}

//! Measures the programs on a real node, side by side with the Go implementation if its folder is given.
//!
//! `cargo xtask bench [--peer DIR]` runs this; all values come from the same machine in the same run.

mod at_size;
mod bare;
mod clone_set;
mod cluster;
mod fan_out;
mod footprint;
mod in_place;
mod inject;
mod kwok;
mod many_sidecar_sets;
mod many_tags;
mod probes;
mod pull;
mod recreate;
mod recreate_job;
mod report;
mod rollout;
mod rows;
mod side;
mod sidecar_set;
mod usage;

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use report::Report;
use rows::Figures;
use side::{Implementation, Side};

/// Nodes and Pods of the rows that are measured side by side.
const THOUSAND: usize = 1000;

fn main() -> Result<()> {
    let path_from_env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let binaries = path_from_env("KRUISE_BENCH_BINARIES").context("run this by 'cargo xtask bench'")?;
    let groups = std::env::var("KRUISE_BENCH_GROUPS").unwrap_or_default();
    let groups: Vec<&str> = groups.split(',').collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let ours = Implementation::Ours(binaries);
    let mut missing = MissingFigures::default();
    let report = if groups.iter().any(|group| group.starts_with("many-")) {
        Report::AtSize(Box::new(runtime.block_on(measure_at_size(
            &ours,
            &groups,
            &mut missing,
        ))?))
    } else {
        let figures = runtime.block_on(measure_side_by_side(&ours, &groups, &mut missing))?;
        let peer = match path_from_env("KRUISE_BENCH_PEER") {
            Some(dir) => {
                let peer = Implementation::Peer(dir);
                let measured = runtime.block_on(measure_side_by_side(&peer, &groups, &mut missing));
                missing.record(peer.name(), measured)
            }
            None => {
                eprintln!("The Go implementation is not measured: no --peer given.");
                None
            }
        };
        Report::SideBySide(Box::new((figures, peer)))
    };
    print!("{}", report.table());
    if let Some(file) = path_from_env("KRUISE_BENCH_OUT") {
        report.write(&file)?;
        eprintln!("written: {}", file.display());
    }
    missing.into_result()
}

/// Descriptions of failed measurements.
#[derive(Default)]
struct MissingFigures(BTreeSet<String>);

impl MissingFigures {
    fn into_result(self) -> Result<()> {
        let names: Vec<String> = self.0.into_iter().collect();
        ensure!(names.is_empty(), "could not be measured: {}", names.join(", "));
        Ok(())
    }

    /// Records a measurement. A failure is printed and noted, and does not affect the other rows.
    fn record<T>(&mut self, what: &str, measured: Result<T>) -> Option<T> {
        measured
            .inspect_err(|error| {
                eprintln!("{what} could not be measured: {error:#}");
                self.0.insert(what.to_owned());
            })
            .ok()
    }
}

/// Measures these groups of rows for one implementation, on a cluster of its own.
async fn measure_side_by_side(
    implementation: &Implementation,
    groups: &[&str],
    missing: &mut MissingFigures,
) -> Result<Figures> {
    let name = implementation.name();
    let selected = |group: &str| {
        groups.contains(&group).then(|| {
            let what = format!("{name}: {group}");
            eprintln!("==> {what}");
            what
        })
    };
    let mut figures = Figures::default();
    eprintln!("==> {name}: a node and both programs start");
    let mut side = Side::start(implementation).await?;
    footprint::start(&side, &mut figures)?;
    if let Some(what) = selected("memory") {
        missing.record(&what, footprint::idle(&side, &mut figures).await);
    }
    if let Some(what) = selected("pull") {
        missing.record(&what, pull::measure(&side, &mut figures).await);
    }
    if let Some(what) = selected("recreate") {
        missing.record(&what, recreate::measure(&side, &mut figures).await);
        if matches!(implementation, Implementation::Ours(_)) {
            figures.recreate_job = missing.record(&what, recreate_job::measure(&side).await);
        }
    }
    if let Some(what) = selected("probes") {
        figures.probes = missing.record(&what, probes::measure(&side).await);
    }
    if let Some(what) = selected("in-place") {
        figures.in_place = missing.record(&what, in_place::measure(&side).await);
    }
    if let Some(what) = selected("ahead") {
        figures.rollout = missing.record(&what, rollout::measure(&side, false).await);
        figures.rollout_ahead = missing.record(&what, rollout::measure(&side, true).await);
    }
    if let Some(what) = selected("fan-out") {
        figures.fan_out = missing.record(&what, fan_out::measure(&mut side, THOUSAND).await);
    }
    if let Some(what) = selected("clone-set") {
        figures.clone_set = missing.record(&what, clone_set::measure(&mut side, THOUSAND, THOUSAND).await);
    }
    if let Some(what) = selected("sidecar-in-place") {
        figures.sidecar_in_place = missing.record(&what, in_place::measure_sidecar(&side).await);
    }
    if let Some(what) = selected("inject") {
        missing.record(&what, inject::prepare(&side).await);
        if matches!(implementation, Implementation::Ours(_)) {
            let measured = inject::measure(&side, THOUSAND, true).await;
            figures.inject_by_policy = missing.record(&what, measured);
            missing.record(&what, side.restart_without_policies(implementation));
        }
        let measured = inject::measure(&side, THOUSAND, false).await;
        figures.inject = missing.record(&what, measured);
    }
    if let Some(what) = selected("sidecar-set") {
        figures.sidecar_set =
            missing.record(&what, sidecar_set::measure(&mut side, THOUSAND, THOUSAND).await);
    }
    Ok(figures)
}

/// Measures these groups of rows at their own sizes, each on a cluster of its own.
async fn measure_at_size(
    implementation: &Implementation,
    groups: &[&str],
    missing: &mut MissingFigures,
) -> Result<Figures> {
    let mut figures = Figures::default();
    for group in groups {
        eprintln!("==> {group}");
        let Some(mut side) = missing.record(group, Side::start(implementation).await) else {
            continue;
        };
        match *group {
            "many-pods-of-node" => {
                figures.full_node = missing.record(group, at_size::full_node(&side).await);
            }
            "many-nodes" => figures.many_nodes = missing.record(group, at_size::nodes(&mut side).await),
            "many-tags" => figures.many_tags = missing.record(group, many_tags::measure(&mut side).await),
            "many-pods" => figures.many_pods = missing.record(group, at_size::pods(&mut side).await),
            "many-sets" => figures.many_sets = missing.record(group, at_size::sets(&mut side).await),
            "many-sidecars" => {
                figures.many_sidecars = missing.record(group, at_size::sidecars(&mut side).await);
            }
            "many-sidecar-sets" => {
                figures.many_sidecar_sets =
                    missing.record(group, many_sidecar_sets::measure(&mut side).await);
            }
            _ => anyhow::bail!("{group} is not measured at size"),
        }
    }
    Ok(figures)
}

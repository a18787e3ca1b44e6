//! The rows, and their targets.

use std::time::Duration;

use crate::clone_set::{LifecycleCosts, PhaseCosts};
use crate::fan_out::FanOut;
use crate::in_place::InPlaceTimes;
use crate::rollout::Rollout;

/// Measurements of one implementation; None if a measurement failed.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    pub job_present: Option<Duration>,
    pub job_pull_above_bare: Option<Duration>,
    pub fan_out: Option<FanOut>,
    pub recreate_exit: Option<Duration>,
    pub recreate_completed: Option<Duration>,
    pub recreate_own: Option<Duration>,
    pub kubelet_restart: Option<Duration>,
    pub recreate_three: Option<Duration>,
    pub recreate_writes: Option<usize>,
    pub clone_set: Option<LifecycleCosts>,
    pub in_place: Option<InPlaceTimes>,
    pub rollout: Option<Rollout>,
    pub rollout_ahead: Option<Rollout>,
    pub daemon_rss: Option<u64>,
    pub daemon_anonymous: Option<u64>,
    pub manager_rss: Option<u64>,
    pub daemon_start: Option<Duration>,
    pub daemon_size: Option<u64>,
    pub manager_size: Option<u64>,
    pub many_nodes: Option<(FanOut, u64)>,
    pub many_pods: Option<LifecycleCosts>,
    pub many_sets: Option<LifecycleCosts>,
}

/// A row: description, unit, target in that unit, and how to read it.
pub struct Row(
    pub &'static str,
    pub &'static str,
    pub f64,
    pub fn(&Figures) -> Option<f64>,
);

/// For a row that is only for comparison.
pub const NO_TARGET: f64 = f64::INFINITY;
const MEGABYTE: f64 = 1_000_000.0;

/// Rows that are measured side by side.
pub const SIDE_BY_SIDE_ROWS: [Row; 33] = [
    Row(
        "ImagePullJob, image on the node: create to completionTime",
        "s",
        0.15,
        |f| seconds(f.job_present),
    ),
    Row(
        "ImagePullJob that pulls 32 MiB: time above a bare CRI pull",
        "s",
        0.1,
        |f| seconds(f.job_pull_above_bare),
    ),
    Row("ImagePullJob over 1,000 kwok nodes", "s", 6.0, |f| {
        seconds(f.fan_out.map(|j| j.time))
    }),
    Row("the same, as a multiple of the bare limit", "x", 1.3, |f| {
        f.fan_out.map(|j| ratio(j.time, j.bare))
    }),
    Row("the same, spec writes per node", "", 1.0, |f| {
        f.fan_out.map(|j| j.writes)
    }),
    Row("the same, manager's processor time", "s", 1.0, |f| {
        seconds(f.fan_out.map(|j| j.cpu))
    }),
    Row("recreate one container: create to task exit", "ms", 15.0, |f| {
        millis(f.recreate_exit)
    }),
    Row(
        "the same, create to Completed without kubelet's part",
        "ms",
        20.0,
        |f| millis(f.recreate_own),
    ),
    Row(
        "the same, API writes of all but kubelet, events apart",
        "",
        4.0,
        |f| Some(f.recreate_writes? as f64),
    ),
    Row("recreate three containers that take 2 s to stop", "s", 3.7, |f| {
        seconds(f.recreate_three)
    }),
    Row("CloneSet, 0 to 1,000 Pods on kwok nodes", "s", NO_TARGET, |f| {
        wall_time(up_phase(f.clone_set))
    }),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| bare_ratio(up_phase(f.clone_set))),
    Row(WRITES_ROW, "", 2.0, |f| writes_per_pod(up_phase(f.clone_set))),
    Row(CPU_ROW, "s", 2.0, |f| cpu_time(up_phase(f.clone_set))),
    Row(
        "all of them updated in place, maxUnavailable 100%",
        "s",
        NO_TARGET,
        |f| wall_time(update_phase(f.clone_set)),
    ),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| {
        bare_ratio(update_phase(f.clone_set))
    }),
    Row(WRITES_ROW, "", 2.0, |f| writes_per_pod(update_phase(f.clone_set))),
    Row(CPU_ROW, "s", 1.5, |f| cpu_time(update_phase(f.clone_set))),
    Row("all of them deleted", "s", NO_TARGET, |f| {
        wall_time(down_phase(f.clone_set))
    }),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| bare_ratio(down_phase(f.clone_set))),
    Row(WRITES_ROW, "", 2.0, |f| writes_per_pod(down_phase(f.clone_set))),
    Row(CPU_ROW, "s", 1.5, |f| cpu_time(down_phase(f.clone_set))),
    Row(
        "CloneSet, image change to the Pod's change (the rest is kubelet's)",
        "ms",
        50.0,
        |f| millis(f.in_place.map(|r| r.pod_patched)),
    ),
    Row(
        "the same, to the new container running, beyond a Pod's that nobody controls",
        "ms",
        50.0,
        |f| {
            millis(
                f.in_place
                    .map(|r| r.container_started.saturating_sub(r.kubelet_alone)),
            )
        },
    ),
    Row(
        "rollout of 4 Pods to a 300 MiB image: longest outage of a Pod",
        "s",
        NO_TARGET,
        |f| seconds(f.rollout.map(|r| r.outage)),
    ),
    Row("the same, pulled ahead, as a share of that", "x", 1.0, |f| {
        Some(ratio(f.rollout_ahead?.outage, f.rollout?.outage))
    }),
    Row("daemon, resident memory, idle", "MB", 9.0, |f| {
        megabytes(f.daemon_rss)
    }),
    Row("of which anonymous", "MB", 2.0, |f| megabytes(f.daemon_anonymous)),
    Row("manager, resident memory, idle", "MB", 15.0, |f| {
        megabytes(f.manager_rss)
    }),
    Row("manager, with 1,000 nodes and 1,000 Pods", "MB", 40.0, |f| {
        megabytes(f.clone_set.map(|l| l.rss))
    }),
    Row("daemon, start to healthy and watching", "s", 0.1, |f| {
        seconds(f.daemon_start)
    }),
    Row("daemon, binary", "MB", 10.0, |f| megabytes(f.daemon_size)),
    Row("manager, binary", "MB", 15.0, |f| megabytes(f.manager_size)),
];

/// Rows that are measured for our programs only.
pub const AT_SIZE_ROWS: [Row; 21] = [
    Row("ImagePullJob over 10,000 kwok nodes", "s", NO_TARGET, |f| {
        seconds(f.many_nodes.map(|(j, _)| j.time))
    }),
    Row(BARE_RATIO_ROW, "x", 1.3, |f| {
        f.many_nodes.map(|(j, _)| ratio(j.time, j.bare))
    }),
    Row(CPU_ROW, "s", 10.0, |f| seconds(f.many_nodes.map(|(j, _)| j.cpu))),
    Row("manager, resident memory afterwards", "MB", 100.0, |f| {
        megabytes(f.many_nodes.map(|(_, rss)| rss))
    }),
    Row("one CloneSet, 0 to 10,000 Pods", "s", NO_TARGET, |f| {
        wall_time(up_phase(f.many_pods))
    }),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| bare_ratio(up_phase(f.many_pods))),
    Row(CPU_ROW, "s", 20.0, |f| cpu_time(up_phase(f.many_pods))),
    Row("all of them updated in place", "s", NO_TARGET, |f| {
        wall_time(update_phase(f.many_pods))
    }),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| {
        bare_ratio(update_phase(f.many_pods))
    }),
    Row(CPU_ROW, "s", 15.0, |f| cpu_time(update_phase(f.many_pods))),
    Row("all of them deleted", "s", NO_TARGET, |f| {
        wall_time(down_phase(f.many_pods))
    }),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| bare_ratio(down_phase(f.many_pods))),
    Row(CPU_ROW, "s", 15.0, |f| cpu_time(down_phase(f.many_pods))),
    Row("manager, with all of them", "MB", 120.0, |f| {
        megabytes(f.many_pods.map(|l| l.rss))
    }),
    Row("1,000 CloneSets, 0 to 10 Pods each", "s", NO_TARGET, |f| {
        wall_time(up_phase(f.many_sets))
    }),
    Row(CPU_ROW, "s", 20.0, |f| cpu_time(up_phase(f.many_sets))),
    Row("all of them updated in place", "s", NO_TARGET, |f| {
        wall_time(update_phase(f.many_sets))
    }),
    Row(CPU_ROW, "s", 15.0, |f| cpu_time(update_phase(f.many_sets))),
    Row("all of them deleted", "s", NO_TARGET, |f| {
        wall_time(down_phase(f.many_sets))
    }),
    Row(CPU_ROW, "s", 15.0, |f| cpu_time(down_phase(f.many_sets))),
    Row("manager, with all of them", "MB", 140.0, |f| {
        megabytes(f.many_sets.map(|l| l.rss))
    }),
];

const BARE_RATIO_ROW: &str = "the same, as a multiple of the bare limit";
const WRITES_ROW: &str = "the same, the manager's writes per Pod";
const CPU_ROW: &str = "the same, manager's processor time";

fn up_phase(costs: Option<LifecycleCosts>) -> Option<PhaseCosts> {
    Some(costs?.up)
}

fn update_phase(costs: Option<LifecycleCosts>) -> Option<PhaseCosts> {
    Some(costs?.update)
}

fn down_phase(costs: Option<LifecycleCosts>) -> Option<PhaseCosts> {
    Some(costs?.down)
}

fn wall_time(phase: Option<PhaseCosts>) -> Option<f64> {
    seconds(phase.map(|p| p.time))
}

fn bare_ratio(phase: Option<PhaseCosts>) -> Option<f64> {
    phase.map(|p| ratio(p.time, p.bare))
}

fn writes_per_pod(phase: Option<PhaseCosts>) -> Option<f64> {
    phase.map(|p| p.writes)
}

fn cpu_time(phase: Option<PhaseCosts>) -> Option<f64> {
    seconds(phase.map(|p| p.cpu))
}

fn ratio(time: Duration, bare: Duration) -> f64 {
    time.as_secs_f64() / bare.as_secs_f64()
}

pub fn seconds(time: Option<Duration>) -> Option<f64> {
    Some(time?.as_secs_f64())
}

fn millis(time: Option<Duration>) -> Option<f64> {
    Some(time?.as_secs_f64() * 1000.0)
}

fn megabytes(bytes: Option<u64>) -> Option<f64> {
    Some(bytes? as f64 / MEGABYTE)
}

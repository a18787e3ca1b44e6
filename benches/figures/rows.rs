//! What is measured, and what it should come to.

use std::time::Duration;

use crate::clone_set::{Life, Phase};
use crate::fan_out::FanOut;
use crate::in_place::Restarts;
use crate::rollout::Rollout;

/// What was measured of one implementation; none where it could not be.
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
    pub clone_set: Option<Life>,
    pub in_place: Option<Restarts>,
    pub rollout: Option<Rollout>,
    pub rollout_ahead: Option<Rollout>,
    pub daemon_rss: Option<u64>,
    pub daemon_anonymous: Option<u64>,
    pub manager_rss: Option<u64>,
    pub daemon_start: Option<Duration>,
    pub daemon_size: Option<u64>,
    pub manager_size: Option<u64>,
    pub many_nodes: Option<(FanOut, u64)>,
    pub many_pods: Option<Life>,
    pub many_sets: Option<Life>,
}

/// A row: what, its unit, the figure to reach in that unit, and how to read it.
pub struct Row(
    pub &'static str,
    pub &'static str,
    pub f64,
    pub fn(&Figures) -> Option<f64>,
);

/// Of a row that is there to compare with.
pub const FREE: f64 = f64::INFINITY;
const MEGABYTE: f64 = 1_000_000.0;

/// What is measured side by side.
pub const BESIDE: [Row; 33] = [
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
    Row("CloneSet, 0 to 1,000 Pods on kwok nodes", "s", FREE, |f| {
        time(up(f.clone_set))
    }),
    Row(LIMIT, "x", 1.5, |f| limit(up(f.clone_set))),
    Row(WRITES, "", 2.0, |f| writes(up(f.clone_set))),
    Row(CPU, "s", 2.0, |f| cpu(up(f.clone_set))),
    Row(
        "all of them updated in place, maxUnavailable 100%",
        "s",
        FREE,
        |f| time(update(f.clone_set)),
    ),
    Row(LIMIT, "x", 1.5, |f| limit(update(f.clone_set))),
    Row(WRITES, "", 2.0, |f| writes(update(f.clone_set))),
    Row(CPU, "s", 1.5, |f| cpu(update(f.clone_set))),
    Row("all of them deleted", "s", FREE, |f| time(down(f.clone_set))),
    Row(LIMIT, "x", 1.5, |f| limit(down(f.clone_set))),
    Row(WRITES, "", 2.0, |f| writes(down(f.clone_set))),
    Row(CPU, "s", 1.5, |f| cpu(down(f.clone_set))),
    Row(
        "CloneSet, image change to the Pod's change (the rest is kubelet's)",
        "ms",
        50.0,
        |f| millis(f.in_place.map(|r| r.own)),
    ),
    Row(
        "the same, to the new container running, beyond a Pod's that nobody controls",
        "ms",
        50.0,
        |f| millis(f.in_place.map(|r| r.total.saturating_sub(r.kubelet))),
    ),
    Row(
        "rollout of 4 Pods to a 300 MiB image: longest outage of a Pod",
        "s",
        FREE,
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

/// What is measured of ours alone.
pub const ALONE: [Row; 21] = [
    Row("ImagePullJob over 10,000 kwok nodes", "s", FREE, |f| {
        seconds(f.many_nodes.map(|(j, _)| j.time))
    }),
    Row(LIMIT, "x", 1.3, |f| {
        f.many_nodes.map(|(j, _)| ratio(j.time, j.bare))
    }),
    Row(CPU, "s", 10.0, |f| seconds(f.many_nodes.map(|(j, _)| j.cpu))),
    Row("manager, resident memory afterwards", "MB", 100.0, |f| {
        megabytes(f.many_nodes.map(|(_, rss)| rss))
    }),
    Row("one CloneSet, 0 to 10,000 Pods", "s", FREE, |f| {
        time(up(f.many_pods))
    }),
    Row(LIMIT, "x", 1.5, |f| limit(up(f.many_pods))),
    Row(CPU, "s", 20.0, |f| cpu(up(f.many_pods))),
    Row("all of them updated in place", "s", FREE, |f| {
        time(update(f.many_pods))
    }),
    Row(LIMIT, "x", 1.5, |f| limit(update(f.many_pods))),
    Row(CPU, "s", 15.0, |f| cpu(update(f.many_pods))),
    Row("all of them deleted", "s", FREE, |f| time(down(f.many_pods))),
    Row(LIMIT, "x", 1.5, |f| limit(down(f.many_pods))),
    Row(CPU, "s", 15.0, |f| cpu(down(f.many_pods))),
    Row("manager, with all of them", "MB", 120.0, |f| {
        megabytes(f.many_pods.map(|l| l.rss))
    }),
    Row("1,000 CloneSets, 0 to 10 Pods each", "s", FREE, |f| {
        time(up(f.many_sets))
    }),
    Row(CPU, "s", 20.0, |f| cpu(up(f.many_sets))),
    Row("all of them updated in place", "s", FREE, |f| {
        time(update(f.many_sets))
    }),
    Row(CPU, "s", 15.0, |f| cpu(update(f.many_sets))),
    Row("all of them deleted", "s", FREE, |f| time(down(f.many_sets))),
    Row(CPU, "s", 15.0, |f| cpu(down(f.many_sets))),
    Row("manager, with all of them", "MB", 140.0, |f| {
        megabytes(f.many_sets.map(|l| l.rss))
    }),
];

const LIMIT: &str = "the same, as a multiple of the bare limit";
const WRITES: &str = "the same, the manager's writes per Pod";
const CPU: &str = "the same, manager's processor time";

fn up(life: Option<Life>) -> Option<Phase> {
    Some(life?.up)
}

fn update(life: Option<Life>) -> Option<Phase> {
    Some(life?.update)
}

fn down(life: Option<Life>) -> Option<Phase> {
    Some(life?.down)
}

fn time(phase: Option<Phase>) -> Option<f64> {
    seconds(phase.map(|p| p.time))
}

fn limit(phase: Option<Phase>) -> Option<f64> {
    phase.map(|p| ratio(p.time, p.bare))
}

fn writes(phase: Option<Phase>) -> Option<f64> {
    phase.map(|p| p.writes)
}

fn cpu(phase: Option<Phase>) -> Option<f64> {
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

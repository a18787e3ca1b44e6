//! The rows, and their targets.

use std::time::Duration;

use crate::at_size::FullNode;
use crate::clone_set::{LifecycleCosts, PhaseCosts};
use crate::fan_out::FanOut;
use crate::in_place::InPlaceTimes;
use crate::inject::{CreationTimes, InjectionCosts};
use crate::many_sidecar_sets::{ChangeCosts, ManySidecarSets};
use crate::many_tags::ManyTags;
use crate::rollout::Rollout;
use crate::sidecar_set::SidecarUpdate;

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
    /// For one Pod.
    pub recreate_job: Option<Duration>,
    pub clone_set: Option<LifecycleCosts>,
    pub in_place: Option<InPlaceTimes>,
    pub rollout: Option<Rollout>,
    pub rollout_ahead: Option<Rollout>,
    /// Share of a processor.
    pub probes: Option<f64>,
    pub daemon_rss: Option<u64>,
    pub daemon_anonymous: Option<u64>,
    /// Share of a processor.
    pub daemon_idle: Option<f64>,
    pub manager_rss: Option<u64>,
    pub daemon_start: Option<Duration>,
    pub daemon_size: Option<u64>,
    pub manager_size: Option<u64>,
    pub full_node: Option<FullNode>,
    pub many_nodes: Option<(FanOut, u64)>,
    pub many_tags: Option<ManyTags>,
    pub many_pods: Option<LifecycleCosts>,
    pub many_sets: Option<LifecycleCosts>,
    /// Injection by the webhook.
    pub inject: Option<InjectionCosts>,
    /// Injection by the API server.
    pub inject_by_policy: Option<InjectionCosts>,
    pub sidecar_set: Option<SidecarUpdate>,
    pub sidecar_in_place: Option<InPlaceTimes>,
    pub many_sidecars: Option<SidecarUpdate>,
    pub many_sidecar_sets: Option<ManySidecarSets>,
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
pub const SIDE_BY_SIDE_ROWS: [Row; 55] = [
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
    Row(
        "ContainerRecreateJob, one Pod at a time: time per Pod beyond kubelet's own restart",
        "ms",
        NO_TARGET,
        |f| millis(f.recreate_job?.checked_sub(f.kubelet_restart?)),
    ),
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
        "the same, to the new container running, beyond a Pod's without a controller",
        "ms",
        50.0,
        |f| millis(beyond_kubelet(f.in_place)),
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
    Row(
        "1,000 Pods created, three sidecars each by webhook: time above bare creation",
        "s",
        NO_TARGET,
        |f| above_bare(f.inject, |i| i.selected),
    ),
    Row(MEDIAN_ROW, "ms", NO_TARGET, |f| {
        millis(f.inject.map(|i| i.selected.median))
    }),
    Row(P99_ROW, "ms", NO_TARGET, |f| {
        millis(f.inject.map(|i| i.selected.p99))
    }),
    Row(ALONE_ROW, "ms", 3.0, |f| {
        alone_above_bare(f.inject, |i| i.selected)
    }),
    Row(
        "1,000 Pods created, three sidecars each by policy: time above bare creation",
        "s",
        NO_TARGET,
        |f| above_bare(f.inject_by_policy, |i| i.selected),
    ),
    Row(MEDIAN_ROW, "ms", NO_TARGET, |f| {
        millis(f.inject_by_policy.map(|i| i.selected.median))
    }),
    Row(P99_ROW, "ms", NO_TARGET, |f| {
        millis(f.inject_by_policy.map(|i| i.selected.p99))
    }),
    Row(ALONE_ROW, "ms", 3.0, |f| {
        alone_above_bare(f.inject_by_policy, |i| i.selected)
    }),
    Row(
        "1,000 Pods created that no SidecarSet selects: time above bare creation",
        "s",
        NO_TARGET,
        |f| above_bare(f.inject, |i| i.unselected),
    ),
    Row(MEDIAN_ROW, "ms", NO_TARGET, |f| {
        millis(f.inject.map(|i| i.unselected.median))
    }),
    Row(P99_ROW, "ms", NO_TARGET, |f| {
        millis(f.inject.map(|i| i.unselected.p99))
    }),
    Row(ALONE_ROW, "ms", NO_TARGET, |f| {
        alone_above_bare(f.inject, |i| i.unselected)
    }),
    Row(
        "SidecarSet, 1,000 Pods on kwok nodes updated in place, maxUnavailable 100%",
        "s",
        NO_TARGET,
        |f| wall_time(sidecar_phase(f.sidecar_set)),
    ),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| {
        bare_ratio(sidecar_phase(f.sidecar_set))
    }),
    Row(WRITES_ROW, "", 2.0, |f| {
        writes_per_pod(sidecar_phase(f.sidecar_set))
    }),
    Row(CPU_ROW, "s", 2.0, |f| cpu_time(sidecar_phase(f.sidecar_set))),
    Row("manager, with them and 1,000 nodes", "MB", NO_TARGET, |f| {
        megabytes(f.sidecar_set.map(|s| s.rss))
    }),
    Row(
        "SidecarSet, image change to the Pod's change (the rest is kubelet's)",
        "ms",
        NO_TARGET,
        |f| millis(f.sidecar_in_place.map(|r| r.pod_patched)),
    ),
    Row(
        "the same, to the new container running, beyond a Pod's without a controller",
        "ms",
        NO_TARGET,
        |f| millis(beyond_kubelet(f.sidecar_in_place)),
    ),
    Row(
        "200 probes of a PodProbeMarker at 1 s: daemon's processor time",
        "% of a core",
        3.0,
        |f| Some(f.probes? * 100.0),
    ),
    Row("daemon, resident memory, idle", "MB", 9.0, |f| {
        megabytes(f.daemon_rss)
    }),
    Row("of which anonymous", "MB", 2.0, |f| megabytes(f.daemon_anonymous)),
    Row("daemon, processor time, idle", "% of a core", 0.1, |f| {
        Some(f.daemon_idle? * 100.0)
    }),
    Row("manager, resident memory, idle", "MB", 15.0, |f| {
        megabytes(f.manager_rss)
    }),
    Row("manager, with 1,000 nodes and 1,000 Pods", "MB", 40.0, |f| {
        megabytes(f.clone_set.map(|l| l.rss))
    }),
    Row("daemon, start to healthy and watching", "s", 0.1, |f| {
        seconds(f.daemon_start)
    }),
    Row("daemon, binary", "MB", 10.5, |f| megabytes(f.daemon_size)),
    Row("manager, binary", "MB", 15.0, |f| megabytes(f.manager_size)),
];

/// Rows that are measured for our programs only.
pub const AT_SIZE_ROWS: [Row; 40] = [
    Row(
        "daemon, resident memory with 500 Pods on its node",
        "MB",
        16.0,
        |f| megabytes(f.full_node.map(|node| node.rss)),
    ),
    Row("the same, at its peak with a recreate", "MB", NO_TARGET, |f| {
        megabytes(f.full_node.map(|node| node.peak))
    }),
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
    Row(
        "1,000 ImagePullJobs over 1,000 kwok nodes, a million tags",
        "s",
        NO_TARGET,
        |f| seconds(f.many_tags.map(|t| t.time)),
    ),
    Row(CPU_ROW, "s", NO_TARGET, |f| seconds(f.many_tags.map(|t| t.cpu))),
    Row("manager, resident memory afterwards", "MB", NO_TARGET, |f| {
        megabytes(f.many_tags.map(|t| t.rss))
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
    Row(
        "one SidecarSet, 10,000 Pods updated in place",
        "s",
        NO_TARGET,
        |f| wall_time(sidecar_phase(f.many_sidecars)),
    ),
    Row(BARE_RATIO_ROW, "x", 1.5, |f| {
        bare_ratio(sidecar_phase(f.many_sidecars))
    }),
    Row(WRITES_ROW, "", 2.0, |f| {
        writes_per_pod(sidecar_phase(f.many_sidecars))
    }),
    Row(CPU_ROW, "s", 20.0, |f| cpu_time(sidecar_phase(f.many_sidecars))),
    Row("manager, with all of them", "MB", NO_TARGET, |f| {
        megabytes(f.many_sidecars.map(|s| s.rss))
    }),
    Row(
        "500 SidecarSets, 10,000 Pods created, manager's processor time",
        "s",
        NO_TARGET,
        |f| seconds(f.many_sidecar_sets.map(|s| s.creation_cpu)),
    ),
    Row("image of one of them changed, 20 Pods", "s", NO_TARGET, |f| {
        seconds(change(f, 0).map(|c| c.time))
    }),
    Row(CHANGE_CPU_ROW, "ms", NO_TARGET, |f| {
        millis(change(f, 0).map(|c| c.cpu))
    }),
    Row(CHANGE_WRITES_ROW, "", NO_TARGET, |f| {
        change(f, 0).map(|c| c.writes)
    }),
    Row(
        "with 50 SidecarSets: manager's processor time",
        "ms",
        NO_TARGET,
        |f| millis(change(f, 1).map(|c| c.cpu)),
    ),
    Row(CHANGE_WRITES_ROW, "", NO_TARGET, |f| {
        change(f, 1).map(|c| c.writes)
    }),
    Row(
        "with 1 SidecarSet: manager's processor time",
        "ms",
        NO_TARGET,
        |f| millis(change(f, 2).map(|c| c.cpu)),
    ),
    Row(CHANGE_WRITES_ROW, "", NO_TARGET, |f| {
        change(f, 2).map(|c| c.writes)
    }),
    Row(
        "manager, with 500 SidecarSets and 10,000 Pods",
        "MB",
        NO_TARGET,
        |f| megabytes(f.many_sidecar_sets.map(|s| s.rss)),
    ),
];

const BARE_RATIO_ROW: &str = "the same, as a multiple of the bare limit";
const WRITES_ROW: &str = "the same, the manager's writes per Pod";
const CPU_ROW: &str = "the same, manager's processor time";
const MEDIAN_ROW: &str = "the same, median of one creation";
const P99_ROW: &str = "the same, 99th percentile of one creation";
const ALONE_ROW: &str = "the same, created one at a time: median above bare creation";
const CHANGE_CPU_ROW: &str = "the same, manager's processor time for one change";
const CHANGE_WRITES_ROW: &str = "the same, the manager's writes for one change, events apart";

fn up_phase(costs: Option<LifecycleCosts>) -> Option<PhaseCosts> {
    Some(costs?.up)
}

fn update_phase(costs: Option<LifecycleCosts>) -> Option<PhaseCosts> {
    Some(costs?.update)
}

fn down_phase(costs: Option<LifecycleCosts>) -> Option<PhaseCosts> {
    Some(costs?.down)
}

fn sidecar_phase(costs: Option<SidecarUpdate>) -> Option<PhaseCosts> {
    Some(costs?.update)
}

/// Time of a creation above that of the same Pods without webhooks; negative if it was faster.
fn above_bare(costs: Option<InjectionCosts>, creation: fn(&InjectionCosts) -> CreationTimes) -> Option<f64> {
    let costs = costs?;
    Some(creation(&costs).total.as_secs_f64() - costs.bare.total.as_secs_f64())
}

/// The same of the median, when one Pod is created at a time. Milliseconds.
fn alone_above_bare(
    costs: Option<InjectionCosts>,
    creation: fn(&InjectionCosts) -> CreationTimes,
) -> Option<f64> {
    let costs = costs?;
    let [alone, bare] = [creation(&costs), costs.bare].map(|times| times.alone.as_secs_f64());
    Some((alone - bare) * 1000.0)
}

/// Time of an image change beyond that of a Pod without a controller.
fn beyond_kubelet(times: Option<InPlaceTimes>) -> Option<Duration> {
    times.map(|times| times.container_started.saturating_sub(times.kubelet_alone))
}

fn change(figures: &Figures, at: usize) -> Option<ChangeCosts> {
    figures.many_sidecar_sets?.changes.get(at).copied()
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

pub fn millis(time: Option<Duration>) -> Option<f64> {
    Some(time?.as_secs_f64() * 1000.0)
}

fn megabytes(bytes: Option<u64>) -> Option<f64> {
    Some(bytes? as f64 / MEGABYTE)
}

//! Events in the fake cluster and how they are applied.

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::fake_cluster::{BACKUP, FakeCluster, owner_reference};
use super::faults::Fault;
use super::random_histories::{checked_reconcile, edit_container, edit_rolling_update};
use kruise_api::keys;

/// Events between two reconciles. Numbers select one of the existing objects or values.
#[derive(Clone, Debug)]
pub(super) enum ClusterEvent {
    /// Reconciles of the controller.
    Reconcile(u8),
    Seconds(u8),
    Kubelets(u8),
    Hooks(u8),
    Daemons(u8),
    Crash(u8),
    /// A Pod is evicted or ends, and is kept for inspection.
    PodEnds(u8),
    PodDeleted(u8),
    Specified(u8),
    PodsToDelete(u8),
    Faults(u8),
    /// The manager crashes and restarts.
    ManagerRestart,
    /// The CloneSet is deleted with its dependents orphaned, and created again.
    RecreatedCloneSet,
    /// Whether deletions take time from now on.
    SlowDeletion(bool),
    /// A user creates a Pod that the selector matches.
    OrphanPod,
    /// Another owner is added to a claim, possibly as its controller.
    SharedClaim(u8),
    /// A foreign Pod takes a name that one of ours should have had.
    ForeignPod(u8),
    /// A user creates objects with a forged owner reference to the CloneSet.
    ForgedOwner(u8),
    /// A Pod's label is changed so that the selector does not match, or restored.
    SelectorLabel(u8),
    /// A label that the priority and scatter strategies use.
    RankLabel(u8),
    Priority(u8),
    Scatter(bool),
    /// The image of the second container, or of both.
    SideImage(u8),
    Replicas(u8),
    /// The templates of new claims.
    Claims(u8),
    Image(u8),
    Cpu(u8),
    Command(u8),
    Label(u8),
    /// An annotation of the template.
    Annotation(u8),
    Partition(u8),
    Unavailable(u8),
    Surge(u8),
    Paused(bool),
    Policy(u8),
    Grace(u8),
    MinReady(u8),
    ScaleUnavailable(u8),
    MarkNotReady(bool),
    /// A hook is removed from the spec, or added again.
    HookInSpec(u8),
    PvcReuse(bool),
    Exclude(bool),
    OnDelete(bool),
    /// Whether the API server refuses new templates from now on.
    TemplatesRefused(bool),
}

/// Relative frequency of an event, and its constructor; the number selects one of the existing objects or values.
type EventKind = (u8, fn(u8) -> ClusterEvent);

const EVENT_KINDS: [EventKind; 44] = {
    use ClusterEvent::*;
    [
        (12, |n| Reconcile(n % 3 + 1)),
        (4, Seconds),
        (8, Kubelets),
        (6, Hooks),
        (5, Daemons),
        (1, Crash),
        (1, PodEnds),
        (1, PodDeleted),
        (1, Specified),
        (1, PodsToDelete),
        (2, Faults),
        (1, |_| ManagerRestart),
        (1, |_| RecreatedCloneSet),
        (1, |n| SlowDeletion(odd(n))),
        (1, |_| OrphanPod),
        (1, SharedClaim),
        (1, ForeignPod),
        (1, ForgedOwner),
        (1, SelectorLabel),
        (1, RankLabel),
        (1, Priority),
        (1, |n| Scatter(odd(n))),
        (3, SideImage),
        (1, Replicas),
        (1, Claims),
        (3, Image),
        (2, Cpu),
        (1, Command),
        (1, Label),
        (1, Annotation),
        (2, Partition),
        (1, Unavailable),
        (1, Surge),
        (1, |n| Paused(odd(n))),
        (1, Policy),
        (1, Grace),
        (1, MinReady),
        (1, ScaleUnavailable),
        (1, |n| MarkNotReady(odd(n))),
        (1, HookInSpec),
        (1, |n| PvcReuse(odd(n))),
        (1, |n| Exclude(odd(n))),
        (1, |n| OnDelete(odd(n))),
        (2, |n| TemplatesRefused(odd(n))),
    ]
};

fn odd(n: u8) -> bool {
    n % 2 == 1
}

/// One strategy for all events: separate ones would take longer to sample than the history takes to run.
pub(super) fn cluster_event() -> impl Strategy<Value = ClusterEvent> {
    let total: u8 = EVENT_KINDS.iter().map(|(times, _)| times).sum();
    (0..total, any::<u8>()).prop_map(|(mut at, n)| {
        let mut kinds = EVENT_KINDS.iter();
        let kind = kinds.find_map(|(times, kind)| {
            let here = at < *times;
            at = at.saturating_sub(*times);
            here.then_some(kind)
        });
        kind.unwrap()(n)
    })
}

fn pick_pod(cluster: &FakeCluster, n: u8) -> Option<String> {
    let names: Vec<&String> = cluster.pods.keys().collect();
    names
        .get(usize::from(n) % names.len().max(1))
        .map(|name| (*name).clone())
}

/// Some of the Pods, by the bits of `n`.
fn some_pods(cluster: &FakeCluster, n: u8) -> Vec<String> {
    let named = cluster.pods.keys().enumerate();
    named
        .filter(|(at, _)| n & (1 << (at % 8)) != 0)
        .map(|(_, name)| name.clone())
        .collect()
}

fn percentage_or_count(n: u8, replicas: u8) -> Value {
    let percent = ["0%", "25%", "50%", "99%", "100%"];
    match n % 3 {
        0 => json!(percent[usize::from(n / 3) % percent.len()]),
        _ => json!(n / 3 % (replicas + 1)),
    }
}

pub(super) fn apply_event(cluster: &mut FakeCluster, event: &ClusterEvent) {
    match event {
        ClusterEvent::Reconcile(times) => (0..*times).for_each(|_| drop(checked_reconcile(cluster))),
        ClusterEvent::Seconds(n) => {
            cluster.now = cluster.now.checked_add(i64::from(*n % 40).seconds()).unwrap();
            cluster.not_yet_watched.clear();
        }
        ClusterEvent::Kubelets(n) => some_pods(cluster, *n)
            .iter()
            .for_each(|name| cluster.run_kubelet(name)),
        ClusterEvent::Hooks(n) => some_pods(cluster, *n)
            .iter()
            .for_each(|name| cluster.run_hook_user(name)),
        ClusterEvent::Daemons(n) => some_pods(cluster, *n)
            .iter()
            .for_each(|name| cluster.run_daemon(name)),
        ClusterEvent::Crash(n) => pick_pod(cluster, *n)
            .iter()
            .for_each(|name| cluster.crash_container(name)),
        ClusterEvent::PodEnds(n) => {
            let phase = if odd(*n) { "Failed" } else { "Succeeded" };
            pick_pod(cluster, n / 2)
                .iter()
                .for_each(|name| cluster.end_pod(name, phase));
        }
        ClusterEvent::PodDeleted(n) => pick_pod(cluster, *n)
            .iter()
            .for_each(|name| cluster.delete_pod(name)),
        ClusterEvent::Specified(n) => {
            let name = pick_pod(cluster, *n);
            let pod = name.and_then(|name| cluster.pods.get_mut(&name));
            pod.into_iter()
                .for_each(|pod| pod["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true"));
        }
        ClusterEvent::PodsToDelete(n) => {
            let name = pick_pod(cluster, *n);
            cluster
                .edit(&json!({ "scaleStrategy": { "podsToDelete": name.into_iter().collect::<Vec<_>>() } }));
        }
        ClusterEvent::Faults(n) => {
            let faults = [
                Fault::Refused,
                Fault::FirstWriteOnly,
                Fault::LastWriteRefused,
                Fault::ResizeQuotaExceeded,
                Fault::ResizeUnsupported,
                Fault::ResponseLost,
            ];
            (cluster.failures_left, cluster.fault) = (usize::from(*n % 4), faults[usize::from(n / 4 % 6)]);
        }
        ClusterEvent::ManagerRestart => cluster.restart_manager(),
        ClusterEvent::RecreatedCloneSet => cluster.recreate_without_dependents(),
        other => apply_foreign_event(cluster, other),
    }
}

/// Applies events of others to Pods.
fn apply_foreign_event(cluster: &mut FakeCluster, event: &ClusterEvent) {
    match event {
        ClusterEvent::SlowDeletion(slow) => {
            cluster.slow_deletion = *slow;
            cluster.terminating_jobs.clear();
            cluster.collect_garbage();
        }
        ClusterEvent::OrphanPod => {
            let name = format!("stray-{}", cluster.next_id());
            cluster.create_pod(&name, foreign_pod(json!([])));
        }
        ClusterEvent::SharedClaim(n) => share_claim(cluster, *n),
        ClusterEvent::ForeignPod(n) => {
            let ids = cluster.claims.values();
            let ids = ids.filter_map(|c| c["metadata"]["labels"][keys::CLONESET_INSTANCE_ID].as_str());
            let names = ids
                .map(|id| format!("s-{id}"))
                .chain(cluster.unfinished.pods.keys().cloned());
            let free: Vec<String> = names.filter(|name| !cluster.pods.contains_key(name)).collect();
            if let Some(name) = free.get(usize::from(*n) % free.len().max(1)) {
                cluster.create_pod(
                    name,
                    foreign_pod(json!([{ "uid": "another", "controller": true }])),
                );
            }
        }
        ClusterEvent::ForgedOwner(n) => create_forged_pod(cluster, *n),
        ClusterEvent::SelectorLabel(n) => {
            change_label(cluster, *n, "app", |app| if app == "x" { "apart" } else { "x" })
        }
        ClusterEvent::TemplatesRefused(refusing) => cluster.set_templates_refused(*refusing),
        ClusterEvent::RankLabel(n) => {
            change_label(cluster, *n, "rank", |rank| if rank == "1" { "2" } else { "1" })
        }
        other => edit_spec(cluster, other),
    }
}

/// Adds another owner to one of the claims.
pub(super) fn share_claim(cluster: &mut FakeCluster, n: u8) {
    let at = usize::from(n / 4) % cluster.claims.len().max(1);
    let Some(claim) = cluster.claims.values_mut().nth(at) else {
        return;
    };
    let owners = claim["metadata"]["ownerReferences"].as_array_mut().unwrap();
    owners.retain(|owner| owner["uid"] != BACKUP);
    let takes_over = n & 1 != 0;
    if takes_over {
        owners
            .iter_mut()
            .for_each(|owner| owner["controller"] = json!(false));
    }
    let at = if n & 2 != 0 { owners.len() } else { 0 };
    owners.insert(at, json!({ "uid": BACKUP, "controller": takes_over }));
    claim["shared"] = json!(true);
}

/// Creates a Pod with a forged owner: in another namespace unchanged, or beside ours with a reference that the API
/// server does not resolve. There it has a name, a UID or labels of ours.
fn create_forged_pod(cluster: &mut FakeCluster, n: u8) {
    let forged = [
        owner_reference(),
        json!({ "apiVersion": "apps.kruise.io/v9", "kind": "CloneSet", "name": "s", "uid": "set", "controller": true }),
        json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "t", "uid": "set", "controller": true }),
        json!({ "apiVersion": "v1", "kind": "Pod", "name": "s", "uid": "set", "controller": true }),
    ];
    let at = usize::from(n) % forged.len();
    let mut pod =
        pick_pod(cluster, n / 8).map_or_else(|| foreign_pod(json!([])), |name| cluster.pods[&name].clone());
    pod["metadata"]["ownerReferences"] = json!([forged[at]]);
    if odd(n / 4) || at == 0 {
        cluster.create_pod_elsewhere(pod);
        return;
    }
    let name = format!("forged-{}", cluster.next_id());
    let mut pod = foreign_pod(pod["metadata"]["ownerReferences"].clone());
    pod["metadata"]["annotations"][keys::POD_DELETION_COST] = json!("2147483647");
    cluster.create_pod(&name, pod);
}

/// A Pod that we did not create.
fn foreign_pod(owners: Value) -> Value {
    let container = json!({ "name": "app", "image": "app:1" });
    json!({
        "metadata": { "name": "", "labels": { "app": "x" }, "ownerReferences": owners },
        "spec": { "containers": [container] },
    })
}

/// Changes a label of a Pod.
fn change_label(cluster: &mut FakeCluster, n: u8, key: &str, to: fn(&str) -> &'static str) {
    let name = pick_pod(cluster, n);
    if let Some(pod) = name.and_then(|name| cluster.pods.get_mut(&name)) {
        let label = &mut pod["metadata"]["labels"][key];
        *label = json!(to(label.as_str().unwrap_or_default()));
    }
}

/// A value or null.
fn optional_value(n: u8) -> Value {
    [json!("0"), json!("1"), json!(null)][usize::from(n % 3)].clone()
}

/// Changes the template's containers.
fn edit_containers(cluster: &mut FakeCluster, change: impl FnOnce(&mut Vec<Value>)) {
    let mut all = cluster.set["spec"]["template"]["spec"]["containers"].clone();
    change(all.as_array_mut().unwrap());
    cluster.edit(&json!({ "template": { "spec": { "containers": all } } }));
}

fn edit_spec(cluster: &mut FakeCluster, event: &ClusterEvent) {
    match event {
        ClusterEvent::Replicas(n) => cluster.edit(&json!({ "replicas": n % 9 })),
        ClusterEvent::Claims(n) => {
            let mut templates = cluster.set["spec"]["volumeClaimTemplates"].clone();
            if let Some(data) = templates.get_mut(0) {
                data["spec"]["x"] = json!(n % 2);
                cluster.edit(&json!({ "volumeClaimTemplates": templates }));
                // Claims of the old templates must not be used.
                cluster.unfinished.pods.clear();
            }
        }
        ClusterEvent::Image(n) => {
            let tag = ["1", "2", "3", "bad"][usize::from(n % 4)];
            edit_container(cluster, "image", json!(format!("app:{tag}")));
        }
        ClusterEvent::Cpu(n) => edit_containers(cluster, |all| {
            let at = usize::from(n / 2) % all.len();
            all[at]["resources"]["requests"]["cpu"] = json!(n % 2 + 1);
        }),
        ClusterEvent::Command(n) => edit_container(cluster, "command", json!([format!("run{}", n % 2)])),
        ClusterEvent::Label(n) => {
            edit_template_metadata(cluster, json!({ "labels": { "l": optional_value(*n) } }))
        }
        ClusterEvent::Annotation(n) => {
            edit_template_metadata(cluster, json!({ "annotations": { "n": optional_value(*n) } }))
        }
        ClusterEvent::SideImage(n) => edit_containers(cluster, |all| {
            if let [app, side] = all.as_mut_slice() {
                side["image"] = json!(format!("side:{}", n % 2));
                if n & 2 != 0 {
                    app["image"] = json!(format!("app:{}", n / 4 % 3 + 1));
                }
            }
        }),
        ClusterEvent::MinReady(n) => {
            let seconds = [0, 7, 40, 600][usize::from(n % 4)];
            cluster.edit(&json!({ "minReadySeconds": seconds }));
        }
        ClusterEvent::ScaleUnavailable(n) => {
            let most = if n % 3 == 0 { json!(null) } else { json!(n % 3) };
            cluster.edit(&json!({ "scaleStrategy": { "maxUnavailable": most } }));
        }
        ClusterEvent::PvcReuse(reuse) => {
            cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }))
        }
        ClusterEvent::Exclude(exclude) => {
            cluster.edit(&json!({ "scaleStrategy": { "excludePreparingDelete": exclude } }));
        }
        ClusterEvent::OnDelete(on) => {
            let type_ = if *on { "OnDelete" } else { "RollingUpdate" };
            cluster.edit(&json!({ "updateStrategy": { "type": type_ } }));
        }
        other => edit_strategy(cluster, other),
    }
}

fn edit_template_metadata(cluster: &mut FakeCluster, metadata: Value) {
    cluster.edit(&json!({ "template": { "metadata": metadata } }));
}

/// Changes hooks.
fn edit_hooks(cluster: &mut FakeCluster, event: &ClusterEvent) {
    match event {
        ClusterEvent::MarkNotReady(mark) => {
            for hook in ["preDelete", "inPlaceUpdate"] {
                if cluster.set["spec"]["lifecycle"][hook].is_object() {
                    cluster.edit(&json!({ "lifecycle": { hook: { "markPodNotReady": mark } } }));
                }
            }
        }
        ClusterEvent::HookInSpec(n) => {
            let hook = ["preDelete", "inPlaceUpdate", "preNormal"][usize::from(n / 2 % 3)];
            let hook_spec = [&Value::Null, &cluster.initial_hooks[hook]][usize::from(n % 2)].clone();
            cluster.edit(&json!({ "lifecycle": { hook: hook_spec } }));
        }
        _ => {}
    }
}

/// Changes the update strategy.
fn edit_strategy(cluster: &mut FakeCluster, event: &ClusterEvent) {
    match event {
        ClusterEvent::Partition(n) => {
            edit_rolling_update(cluster, json!({ "partition": percentage_or_count(*n, 8) }))
        }
        ClusterEvent::Unavailable(n) => edit_rolling_update(cluster, json!({ "maxUnavailable": n % 3 })),
        ClusterEvent::Surge(n) => edit_rolling_update(cluster, json!({ "maxSurge": n % 3 })),
        ClusterEvent::Paused(paused) => edit_rolling_update(cluster, json!({ "paused": paused })),
        ClusterEvent::Policy(n) => {
            let policy = [
                "ReCreate",
                "InPlaceIfPossible",
                "InPlaceIfPossible",
                "InPlaceOnly",
            ][usize::from(n % 4)];
            edit_rolling_update(cluster, json!({ "podUpdatePolicy": policy }));
        }
        ClusterEvent::Grace(n) => {
            edit_rolling_update(
                cluster,
                json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": n % 2 * 10 } }),
            );
        }
        ClusterEvent::Priority(n) => {
            let terms = json!([{ "weight": 5, "matchSelector": { "matchLabels": { "rank": "1" } } }]);
            let strategies = [
                json!({ "weightPriority": terms, "orderPriority": null }),
                json!({ "orderPriority": [{ "orderedKey": "rank" }], "weightPriority": null }),
                json!(null),
            ];
            edit_rolling_update(
                cluster,
                json!({ "priorityStrategy": strategies[usize::from(n % 3)] }),
            );
        }
        ClusterEvent::Scatter(on) => {
            let terms = [json!({ "key": "rank", "value": "1" })];
            let terms = terms.iter().filter(|_| *on).collect::<Vec<_>>();
            edit_rolling_update(cluster, json!({ "scatterStrategy": terms }));
        }
        other => edit_hooks(cluster, other),
    }
}

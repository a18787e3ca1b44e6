//! What a NodePodProbe lists, and what results set on a Pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PodCondition, Probe};

use crate::view::{NamedPort, ReportedProbes, with_port_number};
use kruise_api::go_json::encoded_length;
use kruise_api::node_pod_probe::{
    ContainerProbe, ContainerProbeState, MAX_PROBES_OF_POD, PodProbe, ProbeState, liveness_container,
};
use kruise_api::pod_probe_marker::{PodContainerProbe, PodProbeMarker, ProbeMarkerPolicy};
use kruise_cluster::Key;

/// Bytes of all probes of a node with their results, as JSON: etcd accepts 1.5 MiB of one object, in which the daemon
/// also has messages of 512 KiB.
const MAX_NODE_BYTES: usize = 960 << 10;
/// The same of one Pod.
const MAX_POD_BYTES: usize = 40 << 10;
/// Bytes of the result of a probe, without name and message: keys, state, two times and the ID of a container.
const RESULT_BYTES: usize = 256;
/// Bytes of a Pod without names and probes, in both parts of the object: keys, two UIDs and an address.
const POD_BYTES: usize = 256;
/// The limits of the schema of NodePodProbe.
const MAX_NAME_BYTES: usize = 1024;
const MAX_CONTAINER_NAME_BYTES: usize = 64;

/// A Pod that PodProbeMarkers select, or that has liveness probes.
#[derive(Clone, Debug)]
pub struct ProbedPod {
    /// Its UID.
    pub uid: String,
    /// Its node.
    pub node: String,
    /// Its address; empty before it has one.
    pub ip: String,
    /// Its ports with names.
    pub ports: Vec<NamedPort>,
    /// The PodProbeMarkers, sorted by name.
    pub markers: Vec<Arc<PodProbeMarker>>,
    /// The liveness probes that the daemon runs.
    pub liveness: Arc<[ContainerProbe]>,
    /// The probes that a virtual node reports.
    pub reported: Option<Box<ReportedProbes>>,
}

impl PartialEq for ProbedPod {
    fn eq(&self, other: &Self) -> bool {
        let is_same = |(one, other): (&Arc<PodProbeMarker>, &Arc<PodProbeMarker>)| {
            // An unchanged one is shared.
            Arc::ptr_eq(one, other) || one == other
        };
        (&self.uid, &self.node, &self.ip) == (&other.uid, &other.node, &other.ip)
            && self.ports == other.ports
            && self.markers.len() == other.markers.len()
            && self.markers.iter().zip(&other.markers).all(is_same)
            && self.liveness == other.liveness
            && self.reported == other.reported
    }
}

/// What the marks of a Pod depend on.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// UID of the Pod.
    pub uid: String,
    /// The results, as the daemon has listed them.
    pub states: Vec<ContainerProbeState>,
    /// The PodProbeMarkers.
    pub markers: Vec<Arc<PodProbeMarker>>,
    /// Whether conditions are set for them; a virtual node has set them itself.
    pub sets_conditions: bool,
}

impl Results {
    /// The results that a virtual node reports.
    #[must_use]
    pub fn reported(pod: ProbedPod, reported: &ReportedProbes) -> Self {
        let mut markers = pod.markers;
        let name = |marker: &PodProbeMarker| marker.metadata.name.clone().unwrap_or_default();
        markers.retain(|marker| reported.has_marker(&name(marker)));
        let states = markers.iter().flat_map(|marker| {
            let probes = marker.spec.probes.iter();
            probes.filter_map(|probe| reported.state(full_name(&name(marker), &probe.name), probe))
        });
        Self {
            uid: pod.uid,
            states: states.collect(),
            markers,
            sets_conditions: false,
        }
    }

    /// The results of the PodProbeMarkers' probes. Of a probe that sets no condition only the state counts, so that the
    /// Pod is not read for each new message.
    #[must_use]
    pub fn new(uid: String, states: &[ContainerProbeState], markers: Vec<Arc<PodProbeMarker>>) -> Self {
        let of_markers = states
            .iter()
            .filter(|state| liveness_container(&state.name).is_none());
        let states = of_markers.map(|state| {
            let probe = find_probe(&markers, &state.name);
            match probe.and_then(PodContainerProbe::condition_type) {
                Some(_) => state.clone(),
                None => ContainerProbeState {
                    message: String::new(),
                    last_probe_time: None,
                    last_transition_time: None,
                    ..state.clone()
                },
            }
        });
        Self {
            uid,
            states: states.collect(),
            markers,
            sets_conditions: true,
        }
    }
}

/// Name of a probe in a NodePodProbe.
#[must_use]
pub fn full_name(marker: &str, probe: &str) -> String {
    format!("{marker}#{probe}")
}

/// The entries of a node's NodePodProbe: of the Pods that are there now, in the present order, and then the others.
/// OpenKruise's entries that are as ours would be stay as they are.
#[must_use]
pub fn node_probes(current: &[PodProbe], pods: &[(Key, ProbedPod)]) -> Vec<PodProbe> {
    let mut wanted: BTreeMap<&str, (PodProbe, usize)> = BTreeMap::new();
    for (key, pod) in pods {
        let (entry, bytes) = pod_entry(key, pod, MAX_POD_BYTES);
        if !entry.probes.is_empty() {
            wanted.insert(&pod.uid, (entry, bytes));
        }
    }
    let max_bytes = fair_share(wanted.values().map(|(_, bytes)| *bytes).collect());
    for (key, pod) in pods {
        if let Some(large) = wanted
            .get_mut(pod.uid.as_str())
            .filter(|(_, bytes)| *bytes > max_bytes)
        {
            *large = pod_entry(key, pod, max_bytes);
        }
    }
    let mut wanted: BTreeMap<&str, PodProbe> = wanted
        .into_iter()
        .map(|(uid, (entry, _))| (uid, entry))
        .filter(|(_, entry)| !entry.probes.is_empty())
        .collect();
    let mut entries = Vec::new();
    for old in current {
        if let Some(mut entry) = wanted.remove(old.uid.as_str()) {
            keep_order(&old.probes, &mut entry.probes);
            entries.push(entry);
        }
    }
    entries.extend(wanted.into_values());
    entries
}

/// The most that a Pod may take, so that all together fit: what small ones leave is for the others.
fn fair_share(mut needs: Vec<usize>) -> usize {
    needs.sort_unstable();
    let (mut left, mut count) = (MAX_NODE_BYTES, needs.len());
    for need in needs {
        let share = left.checked_div(count).unwrap_or_default();
        if need > share {
            return share;
        }
        left -= need;
        count -= 1;
    }
    MAX_NODE_BYTES
}

/// The entry of a Pod with as many probes as it may have, and the bytes that it takes: those beyond are not run. All
/// tenants of a node share its NodePodProbe, and one that the API server refuses would stop the probes of all.
fn pod_entry(key: &Key, pod: &ProbedPod, max_bytes: usize) -> (PodProbe, usize) {
    let mut entry = PodProbe {
        name: key.name.clone(),
        namespace: key.namespace.clone().unwrap_or_default(),
        uid: pod.uid.clone(),
        ip: pod.ip.clone(),
        probes: Vec::new(),
    };
    let mut bytes = POD_BYTES + 2 * (entry.name.len() + entry.namespace.len());
    let probes = &mut entry.probes;
    // What keeps a Pod alive comes first.
    let liveness = pod.liveness.iter().cloned().map(|probe| ContainerProbe {
        probe: without_empty_fields(probe.probe),
        ..probe
    });
    let liveness: Vec<_> = liveness.collect();
    let markers = pod.markers.iter().map(|marker| marker_probes(marker, pod));
    for source in std::iter::once(liveness).chain(markers) {
        if probes.len() >= MAX_PROBES_OF_POD {
            break;
        }
        for probe in source {
            let is_valid =
                probe.name.len() <= MAX_NAME_BYTES && probe.container_name.len() <= MAX_CONTAINER_NAME_BYTES;
            // A PodProbeMarker that was stored without our rules may have a name twice; as in OpenKruise the last
            // counts.
            let same = probes.iter().position(|one| one.name == probe.name);
            if !is_valid || same.is_none() && probes.len() >= MAX_PROBES_OF_POD {
                continue;
            }
            let json = serde_json::to_string(&probe).map_or(max_bytes, |json| encoded_length(&json));
            let sum = bytes + json + probe.name.len() + RESULT_BYTES;
            if sum > max_bytes {
                continue;
            }
            bytes = sum;
            match same.and_then(|at| probes.get_mut(at)) {
                Some(same) => *same = probe,
                None => probes.push(probe),
            }
        }
    }
    (entry, bytes)
}

/// Sorts probes as they are now; new ones come last.
fn keep_order(old: &[ContainerProbe], probes: &mut [ContainerProbe]) {
    let position = |probe: &ContainerProbe| old.iter().position(|one| one.name == probe.name);
    probes.sort_by_cached_key(|probe| position(probe).unwrap_or(usize::MAX));
}

/// The probes of a PodProbeMarker for a Pod, without those whose port has no number.
fn marker_probes(marker: &PodProbeMarker, pod: &ProbedPod) -> Vec<ContainerProbe> {
    let name = marker.metadata.name.as_deref().unwrap_or_default();
    let probes = marker.spec.probes.iter().filter_map(|probe| {
        Some(ContainerProbe {
            name: full_name(name, &probe.name),
            container_name: probe.container_name.clone(),
            probe: without_empty_fields(with_port_number(
                probe.probe.clone(),
                &probe.container_name,
                &pod.ports,
            )?),
        })
    });
    probes.collect()
}

/// The probe as OpenKruise writes it: numbers that are 0, and texts and lists that are empty, are absent. Otherwise each
/// NodePodProbe would be written again when the manager is replaced by the other.
fn without_empty_fields(mut probe: Probe) -> Probe {
    let numbers = [
        &mut probe.initial_delay_seconds,
        &mut probe.period_seconds,
        &mut probe.timeout_seconds,
        &mut probe.success_threshold,
        &mut probe.failure_threshold,
    ];
    for number in numbers {
        *number = number.filter(|number| *number != 0);
    }
    let drop_empty = |text: &mut Option<String>| *text = text.take().filter(|text| !text.is_empty());
    if let Some(get) = &mut probe.http_get {
        drop_empty(&mut get.host);
        drop_empty(&mut get.path);
        drop_empty(&mut get.scheme);
        get.http_headers = get.http_headers.take().filter(|headers| !headers.is_empty());
    }
    if let Some(tcp) = &mut probe.tcp_socket {
        drop_empty(&mut tcp.host);
    }
    if let Some(exec) = &mut probe.exec {
        exec.command = exec.command.take().filter(|command| !command.is_empty());
    }
    probe
}

/// What a Pod has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodMarks {
    /// Its conditions.
    pub conditions: Vec<PodCondition>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
}

/// What changes on a Pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodChange {
    /// Conditions to set.
    pub conditions: Vec<PodCondition>,
    /// Types of conditions to remove.
    pub removed_conditions: Vec<String>,
    /// Labels to set, or to remove.
    pub labels: BTreeMap<String, Option<String>>,
    /// The same for annotations.
    pub annotations: BTreeMap<String, Option<String>>,
}

/// What is written by one request, and may be refused although the rest is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Conditions.
    Conditions,
    /// Labels and annotations.
    Metadata,
}

impl Part {
    /// Both, in the order in which they are written.
    pub const ALL: [Self; 2] = [Self::Conditions, Self::Metadata];
}

impl PodChange {
    /// That part of it alone.
    #[must_use]
    pub fn part(&self, part: Part) -> Self {
        let change = self.clone();
        match part {
            Part::Conditions => Self {
                labels: BTreeMap::new(),
                annotations: BTreeMap::new(),
                ..change
            },
            Part::Metadata => Self {
                conditions: Vec::new(),
                removed_conditions: Vec::new(),
                ..change
            },
        }
    }

    /// Types and states of the conditions to set.
    pub fn condition_states(&self) -> impl Iterator<Item = (&str, &str)> {
        let conditions = self.conditions.iter();
        conditions.map(|condition| (condition.type_.as_str(), condition.status.as_str()))
    }

    /// Whether a PodProbeMarker sets or removes any of it.
    #[must_use]
    pub fn is_of(&self, marker: &PodProbeMarker) -> bool {
        let is_set = |type_: &str| self.conditions.iter().any(|condition| condition.type_ == type_);
        marker.spec.probes.iter().any(|probe| {
            let mut policies = probe.marker_policy.iter();
            probe.condition_type().is_some_and(is_set)
                || policies.any(|policy| {
                    let mut labels = policy.labels.keys();
                    let mut annotations = policy.annotations.keys();
                    labels.any(|key| self.labels.contains_key(key))
                        || annotations.any(|key| self.annotations.contains_key(key))
                })
        })
    }
}

/// What the results set on the Pod. Of several probes with one condition type the first result counts.
#[must_use]
pub fn pod_change(pod: &PodMarks, results: &Results) -> PodChange {
    let mut wanted = pod.clone();
    let (mut conditions, mut types) = (Vec::new(), BTreeSet::new());
    for state in &results.states {
        let Some(probe) = find_probe(&results.markers, &state.name) else {
            continue;
        };
        if state.state.as_str().is_empty() {
            continue;
        }
        if let Some(type_) = probe.condition_type().filter(|_| results.sets_conditions)
            && types.insert(type_)
        {
            let condition = condition(type_, state);
            let is_same = |old: &&PodCondition| {
                old.type_ == type_
                    && old.status == condition.status
                    && old.message.clone().unwrap_or_default() == state.message
            };
            if pod.conditions.iter().find(is_same).is_none() {
                conditions.push(condition);
            }
        }
        apply_policies(&mut wanted, &probe.marker_policy, Some(&state.state));
    }
    PodChange {
        conditions,
        ..metadata_change(pod, &wanted)
    }
}

/// What goes with a PodProbeMarker. A condition that a readiness gate requires stays, and what `others` set, too.
#[must_use]
pub fn removal(
    pod: &PodMarks,
    marker: &PodProbeMarker,
    others: &[Arc<PodProbeMarker>],
    readiness_gates: &[String],
) -> PodChange {
    let mut wanted = pod.clone();
    let other_probes = || others.iter().flat_map(|other| &other.spec.probes);
    let mut removed_conditions = Vec::new();
    for probe in &marker.spec.probes {
        apply_policies(&mut wanted, &probe.marker_policy, None);
        let condition = probe.condition_type().filter(|type_| {
            let is_set = pod.conditions.iter().any(|condition| condition.type_ == *type_);
            let is_shared = other_probes().any(|other| other.condition_type() == Some(type_));
            is_set && !is_shared && !readiness_gates.iter().any(|gate| gate == type_)
        });
        removed_conditions.extend(condition.map(str::to_owned));
    }
    for policy in other_probes().flat_map(|other| &other.marker_policy) {
        restore(&mut wanted.labels, &pod.labels, &policy.labels);
        restore(&mut wanted.annotations, &pod.annotations, &policy.annotations);
    }
    PodChange {
        removed_conditions,
        ..metadata_change(pod, &wanted)
    }
}

/// The probe of a result, by MARKER#PROBE.
fn find_probe<'a>(markers: &'a [Arc<PodProbeMarker>], name: &str) -> Option<&'a PodContainerProbe> {
    let (marker, probe) = name.split_once('#')?;
    let marker = markers
        .iter()
        .find(|one| one.metadata.name.as_deref() == Some(marker))?;
    marker.spec.probes.iter().find(|one| one.name == probe)
}

fn condition(type_: &str, state: &ContainerProbeState) -> PodCondition {
    let status = match state.state {
        ProbeState::Succeeded => "True",
        _ => "False",
    };
    PodCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        last_probe_time: state.last_probe_time.clone(),
        last_transition_time: state.last_transition_time.clone(),
        message: Some(state.message.clone()),
        ..PodCondition::default()
    }
}

/// Removes what the policies of other states set, and sets what that of `state` does.
fn apply_policies(pod: &mut PodMarks, policies: &[ProbeMarkerPolicy], state: Option<&ProbeState>) {
    let (now, others): (Vec<_>, Vec<_>) = policies.iter().partition(|policy| Some(&policy.state) == state);
    for policy in others {
        // A deleted PodProbeMarker takes no value along that it has not set.
        let is_of_policy = |values: &BTreeMap<String, String>, key: &String, value: &String| {
            let own = values.get(key);
            own.is_some_and(|own| state.is_some() || own == value)
        };
        pod.labels
            .retain(|key, value| !is_of_policy(&policy.labels, key, value));
        pod.annotations
            .retain(|key, value| !is_of_policy(&policy.annotations, key, value));
    }
    for policy in now {
        pod.labels.extend(policy.labels.clone());
        pod.annotations.extend(policy.annotations.clone());
    }
}

/// Puts back the old values of the keys that `shared` has.
fn restore(
    map: &mut BTreeMap<String, String>,
    old: &BTreeMap<String, String>,
    shared: &BTreeMap<String, String>,
) {
    let kept = old.iter().filter(|(key, _)| shared.contains_key(*key));
    map.extend(kept.map(|(key, value)| (key.clone(), value.clone())));
}

/// The change of labels and annotations.
fn metadata_change(old: &PodMarks, new: &PodMarks) -> PodChange {
    PodChange {
        labels: difference(&old.labels, &new.labels),
        annotations: difference(&old.annotations, &new.annotations),
        ..PodChange::default()
    }
}

fn difference(
    old: &BTreeMap<String, String>,
    new: &BTreeMap<String, String>,
) -> BTreeMap<String, Option<String>> {
    let removed = old.keys().filter(|key| !new.contains_key(*key));
    let removed = removed.map(|key| (key.clone(), None));
    let set = new.iter().filter(|(key, value)| old.get(*key) != Some(value));
    removed
        .chain(set.map(|(key, value)| (key.clone(), Some(value.clone()))))
        .collect()
}

#[cfg(test)]
mod tests;

//! Which probe runs when, and what its results mean.
//!
//! Pure: times are given, nothing is sent. A probe of a container that runs is due once its initial delay has passed,
//! and then every period; it never overlaps itself. Its state changes after as many equal results as its threshold
//! requires. A container that does not run is Failed at once, and is not probed: another container may listen on its
//! port. A result belongs to one container: a restart, or another handler, begins with Unknown.
//!
//! Liveness probes differ, as kubelet's do: they begin once the startup probe of the container has succeeded, and the end
//! of a container is no failure of theirs.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use kruise_api::node_pod_probe::{
    ContainerProbeState, MAX_MESSAGE_CHARS, NodePodProbeStatus, PodProbeStatus, ProbeState,
    liveness_container,
};
use kruise_api::time::truncate_to_second;
use kruise_cluster::Key;

/// Bytes of all messages of a node, as etcd stores them: it accepts 1.5 MiB of one object, and all tenants share it.
const MAX_NODE_MESSAGE_BYTES: usize = 512 << 10;
/// The same of one Pod, shared equally by its probes.
const MAX_POD_MESSAGE_BYTES: usize = 4 << 10;
/// Probes of the node at a time: what a probe costs the runtime and the node is paid by all Pods.
const MAX_IN_PROGRESS: usize = 64;
/// The same of one namespace, so that probes that hang leave slots for the others.
const MAX_IN_PROGRESS_OF_NAMESPACE: usize = 48;
/// The longest timeout that a probe can ask for, since it keeps a slot meanwhile.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time over which a starting daemon spreads its probes: the command may have been edited meanwhile.
const MAX_SPREAD: Duration = Duration::from_secs(60);
/// How far the node's clock may differ from the API server's.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(10);

/// Identifies a probe of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProbeKey {
    /// Namespace and name of the Pod.
    pub pod: Key,
    /// UID of the Pod.
    pub uid: String,
    /// MARKER#PROBE.
    pub name: String,
}

impl ProbeKey {
    fn namespace(&self) -> &str {
        self.pod.namespace.as_deref().unwrap_or_default()
    }

    /// Whether it is a liveness probe.
    #[must_use]
    pub fn is_liveness(&self) -> bool {
        liveness_container(&self.name).is_some()
    }
}

impl fmt::Display for ProbeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of Pod {}", self.name, self.pod)
    }
}

/// A probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Name of the container.
    pub container: String,
    /// What is done.
    pub handler: Handler,
    /// From the container's start to its first probe, at least a second.
    pub initial_delay: Duration,
    /// From one probe to the next, at least a second.
    pub period: Duration,
    /// Maximum duration of a probe, from a second to [`MAX_TIMEOUT`].
    pub timeout: Duration,
    /// Consecutive successes that make it Succeeded, at least one.
    pub success_threshold: u32,
    /// Consecutive failures that make it Failed, at least one.
    pub failure_threshold: u32,
}

/// What a probe does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Handler {
    /// Runs a command in the container.
    Exec {
        /// Program and arguments; not empty.
        command: Vec<String>,
    },
    /// Sends an HTTP request to the Pod.
    Http {
        /// Whether to use TLS.
        tls: bool,
        /// The port.
        port: u16,
        /// Path, with query.
        path: String,
        /// Headers, in order.
        headers: Vec<(String, String)>,
    },
    /// Connects to the Pod.
    Tcp {
        /// The port.
        port: u16,
    },
    /// Calls the Pod's health service.
    Grpc {
        /// The port.
        port: u16,
        /// Service, or empty.
        service: String,
    },
    /// Cannot be run, with the reason.
    Invalid(String),
}

/// The end of one probe, with what it printed or answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Success(String),
    /// It failed.
    Failure(String),
    /// It could not be run: the state stays as it is.
    Error(String),
    /// It has ended, and its result is not known: the state stays as it is, with this message.
    Unknown(String),
}

/// The container of a probe, as kubelet reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedContainer {
    /// `RUNTIME://ID`.
    pub id: String,
    /// Whether it runs.
    pub running: bool,
    /// Whether its startup probe has not succeeded yet.
    pub starting: bool,
    /// When it was started, by the node's clock.
    pub started_at: Option<Timestamp>,
}

/// The time by each clock.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Since the start of the daemon.
    pub mono: Duration,
    /// By the clock that status has.
    pub wall: Timestamp,
    /// By the node's clock, as the start of a container.
    pub node: Timestamp,
}

/// A probe to run now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeStart {
    /// The probe.
    pub key: ProbeKey,
    /// Distinguishes it from earlier ones whose results no longer count.
    pub run: u64,
    /// What is done.
    pub handler: Handler,
    /// Maximum duration.
    pub timeout: Duration,
    /// ID of the container, `RUNTIME://ID`.
    pub container_id: String,
}

/// A state that was reached, for an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The probe.
    pub key: ProbeKey,
    /// Succeeded or Failed.
    pub state: ProbeState,
    /// Message of the result.
    pub message: String,
}

/// A published result.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProbeResult {
    state: ProbeState,
    message: String,
    probed_at: Option<Timestamp>,
    changed_at: Option<Timestamp>,
    /// The container that it is of.
    container_id: Option<String>,
}

/// A probe and what is known about it.
#[derive(Debug)]
struct Probe {
    spec: ProbeSpec,
    is_liveness: bool,
    result: Option<ProbeResult>,
    /// The container that the result is of; `None` before the first observation.
    container_id: Option<String>,
    running: bool,
    /// Whether the last probes succeeded, and how many of them.
    streak: Option<(bool, u32)>,
    /// When it is due; `None` while it runs, or while the container does not.
    due: Option<Duration>,
    /// The run in progress.
    in_progress: Option<u64>,
    /// The result has changed since [`ProbeBoard::take_changed`].
    changed: bool,
}

/// All probes of the node.
#[derive(Debug, Default)]
pub struct ProbeBoard {
    probes: BTreeMap<ProbeKey, Probe>,
    next_run: u64,
    synced: bool,
    /// Due probes without a slot.
    waiting: usize,
    /// Probes were added or removed since [`ProbeBoard::take_changed`].
    changed: bool,
}

impl ProbeBoard {
    /// Takes over a new spec. At the first time, a probe continues with its stored result, which is that of an earlier
    /// daemon.
    pub fn sync(&mut self, specs: BTreeMap<ProbeKey, ProbeSpec>, stored: &NodePodProbeStatus, now: Now) {
        let mut stored = results(stored);
        self.changed = true;
        self.probes.retain(|key, _| specs.contains_key(key));
        // Daemons that start together do not probe together, nor does one daemon run all of its probes at once.
        // A probe without a state is not delayed: something waits for it, and its period may be hours.
        let is_first = !std::mem::replace(&mut self.synced, true);
        for (key, spec) in specs {
            let Some(probe) = self.probes.get_mut(&key) else {
                // Later, a stored result is that of a probe that has gone and come back.
                let result = stored
                    .remove(&(key.uid.clone(), key.name.clone()))
                    .filter(|_| is_first);
                let is_known = |result: &ProbeResult| result.state != ProbeState::Unknown;
                let delay = match result.as_ref().is_some_and(is_known) {
                    true => fraction_of(spec.period.min(MAX_SPREAD), &key),
                    false => Duration::ZERO,
                };
                let probe = Probe {
                    is_liveness: key.is_liveness(),
                    result,
                    container_id: None,
                    running: false,
                    streak: None,
                    due: Some(now.mono.saturating_add(delay)),
                    in_progress: None,
                    changed: false,
                    spec,
                };
                self.probes.insert(key, probe);
                continue;
            };
            let old = std::mem::replace(&mut probe.spec, spec);
            if (&old.handler, &old.container) != (&probe.spec.handler, &probe.spec.container) {
                probe.reset(now);
                probe.container_id = None;
                probe.due = Some(now.mono);
            } else if old.initial_delay != probe.spec.initial_delay {
                // The next observation counts it from the container's start.
                (probe.running, probe.due) = (false, Some(now.mono));
            } else if old.period > probe.spec.period && probe.due.is_some() {
                probe.due = Some(now.mono);
            }
        }
    }

    /// All probes.
    #[must_use]
    pub fn keys(&self) -> Vec<ProbeKey> {
        self.probes.keys().cloned().collect()
    }

    /// Takes over what kubelet reports about the container of a probe: `None` without the Pod or its status.
    pub fn observe(
        &mut self,
        key: &ProbeKey,
        now: Now,
        container: impl FnOnce(&str) -> Option<ObservedContainer>,
    ) -> Option<Transition> {
        let probe = self.probes.get_mut(key)?;
        let observed = container(&probe.spec.container).filter(|container| !container.id.is_empty());
        let transition = probe.observe(observed, now)?;
        Some(transition.of(key))
    }

    /// A container could not be observed: the probe does not run until the next observation, which is like the first
    /// one of a daemon.
    pub fn forget_container(&mut self, key: &ProbeKey) {
        if let Some(probe) = self.probes.get_mut(key) {
            (probe.container_id, probe.running) = (None, false);
            (probe.streak, probe.in_progress) = (None, None);
        }
    }

    /// The probes that are due and have a slot: of namespaces that have few, and due for long, first.
    pub fn start_due(&mut self, now: Now) -> Vec<ProbeStart> {
        let mut used: BTreeMap<&str, usize> = BTreeMap::new();
        let mut due: BTreeMap<&str, Vec<(Duration, &ProbeKey)>> = BTreeMap::new();
        let mut free = MAX_IN_PROGRESS;
        for (key, probe) in &self.probes {
            if probe.in_progress.is_some() {
                *used.entry(key.namespace()).or_default() += 1;
                free = free.saturating_sub(1);
            } else if let Some(at) = probe.due.filter(|at| probe.running && *at <= now.mono) {
                due.entry(key.namespace()).or_default().push((at, key));
            }
        }
        self.waiting = due.values().map(Vec::len).sum();
        for probes in due.values_mut() {
            probes.sort_by(|one, other| other.cmp(one));
        }
        let mut keys = Vec::new();
        while free > 0 {
            let next = due.iter().filter_map(|(namespace, probes)| {
                let slots = used.get(namespace).copied().unwrap_or_default();
                let oldest = probes.last().filter(|_| slots < MAX_IN_PROGRESS_OF_NAMESPACE)?;
                Some((slots, oldest.0, *namespace))
            });
            let Some((slots, _, namespace)) = next.min() else {
                break;
            };
            used.insert(namespace, slots + 1);
            free -= 1;
            keys.extend(
                due.get_mut(namespace)
                    .and_then(Vec::pop)
                    .map(|(at, key)| (at, key.clone())),
            );
        }
        self.waiting -= keys.len();
        keys.into_iter()
            .filter_map(|(due, key)| self.start(key, due, now))
            .collect()
    }

    fn start(&mut self, key: ProbeKey, due: Duration, now: Now) -> Option<ProbeStart> {
        let probe = self.probes.get_mut(&key)?;
        let container_id = probe.container_id.clone()?;
        self.next_run += 1;
        probe.in_progress = Some(self.next_run);
        // From the planned time, so that the period is kept; but what was missed is not made up for.
        let next = due.saturating_add(probe.spec.period);
        let is_missed = next <= now.mono;
        let period_from_now = now.mono.saturating_add(probe.spec.period);
        probe.due = Some(if is_missed { period_from_now } else { next });
        Some(ProbeStart {
            run: self.next_run,
            handler: probe.spec.handler.clone(),
            timeout: probe.spec.timeout,
            container_id,
            key,
        })
    }

    /// Probes that are due and wait for a slot.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// When the next probe is due, if any, after [`ProbeBoard::start_due`] at `now`. Those that wait for a slot start
    /// when another one ends.
    #[must_use]
    pub fn next_due(&self, now: Now) -> Option<Duration> {
        let idle = self
            .probes
            .values()
            .filter(|probe| probe.running && probe.in_progress.is_none());
        idle.filter_map(|probe| probe.due)
            .filter(|due| *due > now.mono)
            .min()
    }

    /// Whether the result of that run still counts.
    #[must_use]
    pub fn is_in_progress(&self, key: &ProbeKey, run: u64) -> bool {
        self.probes
            .get(key)
            .is_some_and(|probe| probe.in_progress == Some(run))
    }

    /// A probe has ended.
    pub fn on_ended(&mut self, key: &ProbeKey, run: u64, outcome: Outcome, now: Now) -> Option<Transition> {
        let probe = self.probes.get_mut(key)?;
        if probe.in_progress != Some(run) {
            return None;
        }
        probe.in_progress = None;
        // Those that wait for a slot since before it ended come first.
        probe.due = probe.due.map(|due| due.max(now.mono));
        let transition = probe.on_outcome(outcome, now)?;
        Some(transition.of(key))
    }

    /// Whether the status may have changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        let mut changed = std::mem::take(&mut self.changed);
        for probe in self.probes.values_mut() {
            changed |= std::mem::take(&mut probe.changed);
        }
        changed
    }

    /// The status to publish: the probes that have a result.
    #[must_use]
    pub fn status(&self) -> NodePodProbeStatus {
        // By the number of probes, not by what they print: no message depends on another.
        let mut probes_of_pod: BTreeMap<&str, usize> = BTreeMap::new();
        for key in self.probes.keys() {
            *probes_of_pod.entry(&key.uid).or_default() += 1;
        }
        let max_pod_bytes = MAX_POD_MESSAGE_BYTES.min(MAX_NODE_MESSAGE_BYTES / probes_of_pod.len().max(1));
        let mut pods: Vec<PodProbeStatus> = Vec::new();
        for (key, probe) in &self.probes {
            let Some(result) = &probe.result else { continue };
            let state = ContainerProbeState {
                name: key.name.clone(),
                state: result.state.clone(),
                last_probe_time: result.probed_at.map(Time),
                last_transition_time: result.changed_at.map(Time),
                message: within_bytes(
                    &result.message,
                    max_pod_bytes / probes_of_pod.get(key.uid.as_str()).copied().unwrap_or(1),
                ),
                container_id: result.container_id.clone(),
            };
            match pods.last_mut().filter(|pod| pod.uid == key.uid) {
                Some(pod) => pod.probe_states.push(state),
                None => pods.push(PodProbeStatus {
                    name: key.pod.name.clone(),
                    namespace: key.pod.namespace.clone().unwrap_or_default(),
                    uid: key.uid.clone(),
                    probe_states: vec![state],
                }),
            }
        }
        NodePodProbeStatus {
            pod_probe_statuses: pods,
        }
    }
}

/// A transition without the name of its probe.
struct Reached {
    state: ProbeState,
    message: String,
}

impl Reached {
    fn of(self, key: &ProbeKey) -> Transition {
        Transition {
            key: key.clone(),
            state: self.state,
            message: self.message,
        }
    }
}

impl Probe {
    /// The state starts again; a result that was never there does not become Unknown.
    fn reset(&mut self, now: Now) {
        (self.streak, self.in_progress) = (None, None);
        if self.result.is_some() {
            self.record(ProbeState::Unknown, String::new(), now);
        }
    }

    fn observe(&mut self, observed: Option<ObservedContainer>, now: Now) -> Option<Reached> {
        let Some(mut container) = observed else {
            // A run that could not be started has no end.
            (self.running, self.in_progress) = (false, None);
            return None;
        };
        if self.is_liveness {
            container.running &= !container.starting;
        }
        let is_new = self.container_id.as_ref() != Some(&container.id);
        if is_new {
            // The result is of an earlier container, or an earlier daemon has it of this one.
            let is_first = self.container_id.is_none();
            let probed_at = self.result.as_ref().and_then(|result| result.probed_at);
            let started_before = || {
                probed_at.is_some_and(|at| {
                    let start = container.started_at;
                    start.is_some_and(|start| start.duration_since(at) <= MAX_CLOCK_SKEW)
                })
            };
            let result_of = self
                .result
                .as_ref()
                .and_then(|result| result.container_id.as_ref());
            let is_same = is_first
                && match result_of {
                    Some(id) => *id == container.id,
                    // OpenKruise's results, or an older CRD. A failure of a liveness probe restarts its container.
                    None => !self.is_liveness && started_before(),
                };
            let is_known = is_first && !container.running && self.is_non_running();
            self.container_id = Some(container.id);
            if !is_same && !is_known {
                self.reset(now);
                self.due = Some(now.mono);
            }
        }
        let was_running = std::mem::replace(&mut self.running, container.running);
        if !container.running {
            (self.streak, self.in_progress) = (None, None);
            if self.is_liveness {
                return None;
            }
            return self.record(ProbeState::Failed, self.non_running_message(), now);
        }
        if is_new || !was_running {
            let age = container.started_at.map(|start| now.node.duration_since(start));
            let age = age
                .and_then(|age| Duration::try_from(age).ok())
                .unwrap_or_default();
            let first = now
                .mono
                .saturating_add(self.spec.initial_delay.saturating_sub(age));
            self.due = Some(self.due.map_or(first, |due| due.max(first)));
        }
        None
    }

    /// OpenKruise's message of a container that does not run; clients may compare it.
    fn non_running_message(&self) -> String {
        format!("Container({}) is Non-running", self.spec.container)
    }

    /// Whether the result is that of a container that does not run.
    fn is_non_running(&self) -> bool {
        let message = self.non_running_message();
        let result = self.result.as_ref().filter(|_| !self.is_liveness);
        result.is_some_and(|result| result.state == ProbeState::Failed && result.message == message)
    }

    fn on_outcome(&mut self, outcome: Outcome, now: Now) -> Option<Reached> {
        let (success, message) = match outcome {
            Outcome::Success(message) => (true, message),
            Outcome::Failure(message) => (false, message),
            Outcome::Unknown(why) => {
                // Results before it and after it are not consecutive: failures that are hours apart do not add up.
                self.streak = None;
                let result = self.result.as_ref();
                let state = result.map_or(ProbeState::Unknown, |result| result.state.clone());
                return self.record(state, why, now);
            }
            Outcome::Error(why) => {
                // The state stays; without a state, the reason is shown.
                let is_unknown = self
                    .result
                    .as_ref()
                    .is_none_or(|result| result.state == ProbeState::Unknown);
                if is_unknown {
                    self.record(ProbeState::Unknown, why, now);
                }
                return None;
            }
        };
        let count = match self.streak {
            Some((same, count)) if same == success => count.saturating_add(1),
            _ => 1,
        };
        self.streak = Some((success, count));
        let (threshold, state) = match success {
            true => (self.spec.success_threshold, ProbeState::Succeeded),
            false => (self.spec.failure_threshold, ProbeState::Failed),
        };
        if count < threshold {
            return None;
        }
        self.record(state, message, now)
    }

    /// Sets the result if state or message differ.
    fn record(&mut self, state: ProbeState, message: String, now: Now) -> Option<Reached> {
        let message = truncate(&message, MAX_MESSAGE_CHARS);
        // The stored status must equal ours.
        let wall = truncate_to_second(now.wall);
        let old = self.result.as_ref();
        if old.is_some_and(|old| (&old.state, &old.message) == (&state, &message)) {
            return None;
        }
        let same_state = old.filter(|old| old.state == state);
        let changed_at = same_state.map_or(Some(wall), |old| old.changed_at);
        let is_transition = same_state.is_none() && state != ProbeState::Unknown;
        let reached = is_transition.then(|| Reached {
            state: state.clone(),
            message: message.clone(),
        });
        self.changed = true;
        self.result = Some(ProbeResult {
            state,
            message,
            probed_at: Some(wall),
            changed_at,
            container_id: self.container_id.clone(),
        });
        reached
    }
}

/// The stored results by UID of the Pod and name of the probe.
fn results(status: &NodePodProbeStatus) -> BTreeMap<(String, String), ProbeResult> {
    let states = status.pod_probe_statuses.iter().flat_map(|pod| {
        let states = pod.probe_states.iter();
        states.map(|state| {
            let result = ProbeResult {
                state: state.state.clone(),
                message: truncate(&state.message, MAX_MESSAGE_CHARS),
                probed_at: state.last_probe_time.as_ref().map(|time| time.0),
                changed_at: state.last_transition_time.as_ref().map(|time| time.0),
                container_id: state.container_id.clone(),
            };
            ((pod.uid.clone(), state.name.clone()), result)
        })
    });
    states.collect()
}

/// How the current status differs from the stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusChange {
    /// In messages: may be published later.
    Messages,
    /// In states, or in their number: is published at once.
    States,
}

/// UID of the Pod, and name of the probe.
type ProbeId<'a> = (&'a str, &'a str);

fn by_probe(status: &NodePodProbeStatus) -> BTreeMap<ProbeId<'_>, &ContainerProbeState> {
    let pods = status.pod_probe_statuses.iter();
    let states = pods.flat_map(|pod| {
        let states = pod.probe_states.iter();
        states.map(|state| ((pod.uid.as_str(), state.name.as_str()), state))
    });
    states.collect()
}

/// How `current` differs from `stored`; not if only its order does, which may be that of another daemon.
#[must_use]
pub fn status_change(stored: &NodePodProbeStatus, current: &NodePodProbeStatus) -> Option<StatusChange> {
    let (old, new) = (by_probe(stored), by_probe(current));
    let same_state = |key: &ProbeId<'_>, state: &ContainerProbeState| {
        old.get(key).is_some_and(|old| old.state == state.state)
    };
    let states_are_same = old.len() == new.len() && new.iter().all(|(key, state)| same_state(key, state));
    if !states_are_same {
        return Some(StatusChange::States);
    }
    // Not by the container, which an older CRD drops: another one has another state, or another time.
    let content = |state: &ContainerProbeState| {
        let times = (state.last_probe_time.clone(), state.last_transition_time.clone());
        (state.message.clone(), times)
    };
    let same_content = |key: &ProbeId<'_>, state: &ContainerProbeState| {
        old.get(key).is_some_and(|old| content(old) == content(state))
    };
    let contents_are_same = new.iter().all(|(key, state)| same_content(key, state));
    (!contents_are_same).then_some(StatusChange::Messages)
}

/// A part of the period that differs between probes.
fn fraction_of(period: Duration, key: &ProbeKey) -> Duration {
    let text = key.uid.bytes().chain(key.name.bytes());
    let hash = text.fold(7_u32, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(u32::from(byte))
    });
    period.mul_f64(f64::from(hash % 1000) / 1000.0)
}

/// The start of a text that takes so many bytes in the JSON of the API server, which escapes some characters.
fn within_bytes(text: &str, max_bytes: usize) -> String {
    let mut left = max_bytes;
    let fits = |character: &char| {
        let bytes = match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => 6,
            '"' | '\\' => 2,
            control if control.is_control() => 6,
            other => other.len_utf8(),
        };
        let rest = left.checked_sub(bytes);
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    text.chars().take_while(fits).collect()
}

fn truncate(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).collect()
}

#[cfg(test)]
mod tests;

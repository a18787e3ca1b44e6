//! The Pods of this node, reduced to what the controllers need.
//!
//! A store of these takes a fraction of the memory of the Pods themselves: no managed fields, volumes or commands, and
//! of labels, annotations and environment only what [`PodContainerMeta`] contains. Each Pod is reduced while it is
//! read, before the next one.

mod container_meta;
mod error;
mod raw;
mod restart_policy;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Api;
use kube::api::ListParams;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use kruise_api::backoff::Backoff;
use kruise_api::keys;
use kruise_cluster::{Cluster, ObjectView, Store};
use kruise_cri::Runtimes;

pub use container_meta::{DesiredContainer, EnvVar, PodContainerMeta};
use error::{Error, MAX_CONTAINERS, MAX_HOOK_BYTES};
use kruise_api::restart_policy::{ALL_CONTAINERS_RESTARTING, RawRestartRule};
pub use kruise_api::restart_policy::{RestartPolicy, RestartRule};

/// A Pod of this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodePod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; a different Pod of the same name has a different one.
    pub uid: String,
    /// The UID that the runtime has for the Pod: the same except for a static Pod, whose mirror Pod in the API server
    /// has a different UID.
    pub runtime_uid: String,
    /// The node that the Pod is bound to.
    pub node: String,
    /// Whether it has a deletionTimestamp.
    pub terminating: bool,
    /// Whether it has ended permanently (phase Succeeded or Failed).
    pub terminal: bool,
    /// When kubelet restarts its containers after they have ended.
    pub restart_policy: RestartPolicy,
    /// Whether kubelet reports that it restarts all of its containers (condition `AllContainersRestarting`).
    pub restarting_all_containers: bool,
    /// Termination grace period in seconds; kubelet's default of 30 if the Pod has none.
    pub grace_period_seconds: i64,
    /// Its addresses, primary first; the node's if it uses the host's network.
    pub ips: Vec<String>,
    /// Whether it uses the host's network.
    pub host_network: bool,
    /// Its containers and init containers, in spec order.
    pub containers: Vec<PodContainer>,
    /// The metadata to publish for its containers, if any.
    pub meta: Option<Box<PodContainerMeta>>,
}

/// Role of a container in its Pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContainerRole {
    /// One of `spec.containers`.
    #[default]
    Main,
    /// One of `spec.initContainers` with `restartPolicy: Always`: a native sidecar.
    Sidecar,
    /// One of `spec.initContainers` that ends before the main ones start.
    Init,
}

/// One container of a Pod: its spec and its status from kubelet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodContainer {
    /// Its name.
    pub name: String,
    /// Role in the Pod.
    pub role: ContainerRole,
    /// The port that its hook references by name, if any.
    pub ports: Vec<Port>,
    /// The hook that runs before a stop.
    pub pre_stop: Option<core::LifecycleHandler>,
    /// Its own restart policy, which takes precedence over the Pod's.
    pub restart_policy: Option<RestartPolicy>,
    /// Rules that take precedence over both policies.
    pub restart_rules: Vec<RestartRule>,
    /// The last status from kubelet; none before the first report.
    pub status: Option<PodContainerStatus>,
}

/// A container port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Port name, or empty.
    pub name: String,
    /// Port number.
    pub number: i32,
}

/// Kubelet's status of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodContainerStatus {
    /// `RUNTIME://ID` of the newest container; empty before there is one.
    pub container_id: String,
    /// Whether it runs and its readiness probe, if any, succeeds.
    pub ready: bool,
    /// Number of restarts.
    pub restart_count: i32,
    /// Whether it runs.
    pub running: bool,
    /// Whether its startup probe has not succeeded yet.
    pub starting: bool,
    /// When it was started, by the node's clock, while it runs.
    pub started_at: Option<Timestamp>,
    /// Reason and message of state `waiting`, if kubelet delays the start.
    pub waiting: Option<(String, String)>,
    /// The last end of this container, or of the one before it.
    pub last_termination: Option<Termination>,
}

/// The end of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Termination {
    /// Its exit code.
    pub code: i32,
    /// When it was started, by the node's clock.
    pub started_at: Option<Timestamp>,
    /// When it ended, by the node's clock.
    pub finished_at: Option<Timestamp>,
}

/// The maximum duration that a number of an object can request: a year, far below where sums of durations overflow and
/// where gRPC cannot encode them (1e8 hours).
const MAX_DURATION: Duration = Duration::from_secs(365 * 86_400);

/// Converts seconds of an object's field to a duration between zero and a year.
#[must_use]
pub fn bounded_seconds(number: i64) -> Duration {
    Duration::from_secs(u64::try_from(number).unwrap_or(0)).min(MAX_DURATION)
}

/// The minimum time between TERM and KILL, as in kubelet.
pub const MIN_GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Backoff after a failed stop of a container.
pub const STOP_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// Labels that kubelet sets on its containers in the runtime.
const POD_UID_LABEL: &str = "io.kubernetes.pod.uid";
const POD_NAME_LABEL: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE_LABEL: &str = "io.kubernetes.pod.namespace";

/// Annotation of a mirror Pod: the UID of the static Pod in the runtime.
const CONFIG_HASH_ANNOTATION: &str = "kubernetes.io/config.hash";

/// A store of the Pods on `node`, and the task that keeps it up to date. What runs shows which runtime kubelet uses.
pub fn watch(
    cluster: &Cluster,
    node: &str,
    runtimes: Runtimes,
) -> (Store<NodePod>, impl Future<Output = ()> + Send + use<>) {
    let api: Api<core::Pod> = Api::all(cluster.client.clone());
    let on_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    cluster.reflector(api, on_node, move |pod: NodePod| {
        if let Some(name) = pod.runtime_name() {
            runtimes.set_kubelet_runtime(name);
        }
        Some(pod)
    })
}

impl NodePod {
    /// Name of the runtime in which a container of the Pod runs.
    fn runtime_name(&self) -> Option<&str> {
        let statuses = self
            .containers
            .iter()
            .filter_map(|container| container.status.as_ref());
        let mut running = statuses.filter(|status| status.running);
        running.find_map(|status| Some(status.container_id.split_once("://")?.0))
    }

    /// The container with that name.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&PodContainer> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// Whether a container with these labels in the runtime belongs to the Pod. A user who creates Pods may mark one as
    /// a mirror, so for a mirror the name and namespace must match, too.
    #[must_use]
    pub fn owns_container(&self, labels: &BTreeMap<String, String>) -> bool {
        let has_label = |key: &str, value: &str| labels.get(key).is_some_and(|label| label == value);
        let name_matches =
            has_label(POD_NAME_LABEL, &self.name) && has_label(POD_NAMESPACE_LABEL, &self.namespace);
        has_label(POD_UID_LABEL, &self.runtime_uid) && (self.runtime_uid == self.uid || name_matches)
    }

    /// A reference to a container of the Pod for events.
    #[must_use]
    pub fn container_reference(&self, container: &str) -> core::ObjectReference {
        let list = match self.container(container).map(|view| view.role) {
            Some(ContainerRole::Init | ContainerRole::Sidecar) => "initContainers",
            _ => "containers",
        };
        core::ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            field_path: Some(format!("spec.{list}{{{container}}}")),
            ..core::ObjectReference::default()
        }
    }

    /// Reduces a Pod to what the controllers need.
    fn from_raw(pod: raw::Pod<'_>) -> Result<Self, Error> {
        let raw::Pod {
            metadata,
            spec,
            status,
        } = pod;
        let (init, main) = (
            spec.init_containers.unwrap_or_default(),
            spec.containers.unwrap_or_default(),
        );
        if init.len() + main.len() > MAX_CONTAINERS {
            return Err(Error::TooManyContainers);
        }
        let terminal = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        let meta = if terminal {
            None
        } else {
            PodContainerMeta::from_pod(&metadata, &main, &status)?
        };
        let mut statuses = BTreeMap::new();
        let lists = [&status.container_statuses, &status.init_container_statuses];
        for text in lists.into_iter().flatten().flatten() {
            let status: core::ContainerStatus = serde_json::from_str(text.get())?;
            statuses.insert(status.name.clone(), PodContainerStatus::from_status(&status));
        }
        let init = init.into_iter().map(|text| (text, ContainerRole::Init));
        let main = main.into_iter().map(|text| (text, ContainerRole::Main));
        let (mut containers, mut hook_bytes_left) = (Vec::new(), MAX_HOOK_BYTES);
        for (text, role) in init.chain(main) {
            let container: raw::Container<'_> = serde_json::from_str(text.get())?;
            let hook = container.pre_stop().filter(|_| !terminal);
            hook_bytes_left = hook_bytes_left
                .checked_sub(hook.map_or(0, |text| text.get().len()))
                .ok_or(Error::HooksTooLarge)?;
            let status = statuses.remove(&container.name);
            containers.push(PodContainer::from_raw(container, hook, role, status)?);
        }
        let uid = metadata.uid.unwrap_or_default();
        let annotations = metadata.annotations.unwrap_or_default();
        let static_uid = annotations
            .get(keys::MIRROR_POD)
            .and_then(|_| annotations.get(CONFIG_HASH_ANNOTATION));
        let runtime_uid = static_uid.unwrap_or(&uid).clone();
        Ok(Self {
            meta,
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid,
            runtime_uid,
            node: spec.node_name.unwrap_or_default(),
            terminating: metadata.deletion_timestamp.is_some(),
            terminal,
            restart_policy: RestartPolicy::parse(spec.restart_policy.as_deref()).unwrap_or_default(),
            restarting_all_containers: status.has_condition(ALL_CONTAINERS_RESTARTING, "True"),
            grace_period_seconds: spec.termination_grace_period_seconds.unwrap_or(30),
            ips: ips(status.pod_ips, status.pod_ip),
            host_network: spec.host_network.unwrap_or_default(),
            containers,
        })
    }
}

impl ObjectView for NodePod {
    type Kind = core::Pod;
}

impl<'de> Deserialize<'de> for NodePod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_raw(raw::Pod::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

fn ips(all: Option<Vec<raw::Ip>>, first: Option<String>) -> Vec<String> {
    let mut ips: Vec<String> = all.unwrap_or_default().into_iter().map(|ip| ip.ip).collect();
    if ips.is_empty() {
        ips.extend(first.filter(|ip| !ip.is_empty()));
    }
    ips
}

impl PodContainer {
    fn from_raw(
        container: raw::Container<'_>,
        hook: Option<&RawValue>,
        role: ContainerRole,
        status: Option<PodContainerStatus>,
    ) -> Result<Self, Error> {
        let pre_stop: Option<core::LifecycleHandler> =
            hook.map(|text| serde_json::from_str(text.get())).transpose()?;
        let restart = RestartPolicy::parse(container.restart_policy.as_deref());
        let rules = container.restart_policy_rules.into_iter().flatten();
        Ok(Self {
            role: match restart {
                Some(RestartPolicy::Always) if role == ContainerRole::Init => ContainerRole::Sidecar,
                _ => role,
            },
            ports: match (pre_stop.as_ref().and_then(hook_port_name), container.ports) {
                (Some(name), Some(ports)) => find_port(name, ports)?,
                _ => Vec::new(),
            },
            pre_stop,
            restart_policy: restart,
            restart_rules: rules.filter_map(RawRestartRule::parse).collect(),
            status,
            name: container.name,
        })
    }
}

/// The name of the port that a hook references, if it uses a name.
fn hook_port_name(hook: &core::LifecycleHandler) -> Option<&str> {
    match &hook.http_get.as_ref()?.port {
        IntOrString::String(name) => Some(name),
        IntOrString::Int(_) => None,
    }
}

fn find_port(name: &str, ports: &RawValue) -> Result<Vec<Port>, Error> {
    let ports: Vec<raw::Port> = serde_json::from_str(ports.get())?;
    let named = ports.into_iter().filter_map(|port| {
        let number = port.container_port;
        let name = port.name.filter(|other| other == name)?;
        Some(Port { name, number })
    });
    Ok(named.take(1).collect())
}

impl PodContainerStatus {
    fn from_status(status: &core::ContainerStatus) -> Self {
        let state = status.state.as_ref();
        let last = status.last_state.as_ref();
        let terminated = state
            .and_then(|state| state.terminated.as_ref())
            .or_else(|| last.and_then(|state| state.terminated.as_ref()));
        let waiting = state.and_then(|state| state.waiting.as_ref());
        let running = state.and_then(|state| state.running.as_ref());
        Self {
            container_id: status.container_id.clone().unwrap_or_default(),
            ready: status.ready,
            restart_count: status.restart_count,
            running: running.is_some(),
            starting: status.started == Some(false),
            started_at: running
                .and_then(|running| running.started_at.as_ref())
                .map(|time| time.0),
            waiting: waiting.map(|waiting| {
                let text_or_empty = |text: &Option<String>| text.clone().unwrap_or_default();
                (text_or_empty(&waiting.reason), text_or_empty(&waiting.message))
            }),
            last_termination: terminated.map(|termination| Termination {
                code: termination.exit_code,
                started_at: termination.started_at.as_ref().map(|time| time.0),
                finished_at: termination.finished_at.as_ref().map(|time| time.0),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    /// Four containers of three roles, whose statuses have a different order than their specs.
    fn pod() -> Value {
        json!({
            "metadata": {"namespace": "ns", "name": "web", "uid": "u1", "deletionTimestamp": "2026-01-02T03:04:05Z"},
            "spec": {
                "nodeName": "n1", "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 7,
                "initContainers": [{"name": "setup"}, {"name": "mesh", "restartPolicy": "Always"}],
                "containers": [
                    {"name": "b", "lifecycle": {"preStop": {"sleep": {"seconds": 3}}}},
                    {"name": "a", "ports": [{"name": "http", "containerPort": 8080}]},
                ],
            },
            "status": {
                "phase": "Running", "podIP": "10.0.0.9",
                "containerStatuses": [
                    {"name": "a", "image": "i", "imageID": "", "ready": true, "restartCount": 2,
                     "containerID": "containerd://aaa", "state": {"running": {}},
                     "lastState": {"terminated": {"exitCode": 3, "finishedAt": "2026-01-02T03:04:00Z"}}},
                    {"name": "b", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
                     "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}},
                ],
                "initContainerStatuses": [
                    {"name": "mesh", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                     "containerID": "containerd://mmm", "state": {"running": {}}},
                ],
            },
        })
    }

    fn parse(pod: &Value) -> Result<NodePod, String> {
        serde_json::from_str(&pod.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn running_container_shows_the_runtime() {
        let mut pod = pod();
        assert_eq!(parse(&pod).unwrap().runtime_name(), Some("containerd"));
        pod["status"] = json!({ "phase": "Pending" });
        assert_eq!(parse(&pod).unwrap().runtime_name(), None);
    }

    #[test]
    fn static_pod_containers_are_matched_by_config_hash() {
        let mut pod = pod();
        assert_eq!(parse(&pod).unwrap().runtime_uid, "u1");
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.hash": "static"});
        assert_eq!(
            parse(&pod).unwrap().runtime_uid,
            "u1",
            "a user may write one of them"
        );
        pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("static");
        let view = parse(&pod).unwrap();
        assert_eq!((view.uid.as_str(), view.runtime_uid.as_str()), ("u1", "static"));
        let owns = |labels: &[(&str, &str)]| {
            let labels = labels
                .iter()
                .map(|(k, v)| (format!("io.kubernetes.pod.{k}"), (*v).to_owned()));
            view.owns_container(&labels.collect())
        };
        assert!(owns(&[("uid", "static"), ("name", "web"), ("namespace", "ns")]));
        assert!(!owns(&[
            ("uid", "static"),
            ("name", "web"),
            ("namespace", "other")
        ]));
        assert!(!owns(&[("uid", "static")]) && !owns(&[("uid", "u1"), ("name", "web"), ("namespace", "ns")]));
    }

    #[test]
    fn container_statuses_are_matched_by_name() {
        let view = parse(&pod()).unwrap();
        assert!(view.terminating && !view.terminal);
        assert_eq!(
            (view.restart_policy, view.grace_period_seconds),
            (RestartPolicy::OnFailure, 7)
        );
        assert_eq!(view.ips, ["10.0.0.9"]);
        let roles: Vec<_> = view
            .containers
            .iter()
            .map(|c| (c.name.as_str(), c.role))
            .collect();
        let expected = [
            ("setup", ContainerRole::Init),
            ("mesh", ContainerRole::Sidecar),
            ("b", ContainerRole::Main),
            ("a", ContainerRole::Main),
        ];
        assert_eq!(roles, expected);
        let a = view.container("a").unwrap();
        let status = a.status.as_ref().unwrap();
        assert_eq!(
            (status.container_id.as_str(), status.ready),
            ("containerd://aaa", true)
        );
        assert_eq!(status.last_termination.unwrap().code, 3);
        let b = view.container("b").unwrap();
        assert!(b.pre_stop.as_ref().unwrap().sleep.is_some());
        assert_eq!(
            b.status.as_ref().unwrap().waiting.as_ref().unwrap().0,
            "CrashLoopBackOff"
        );
        assert_eq!(
            view.container("mesh")
                .unwrap()
                .status
                .as_ref()
                .unwrap()
                .container_id,
            "containerd://mmm"
        );
    }

    #[test]
    fn only_the_port_of_the_pre_stop_hook_is_kept() {
        let mut pod = pod();
        let container = &mut pod["spec"]["containers"][1];
        container["ports"] = json!([{"containerPort": 1}, {"name": "http", "containerPort": 8080}]);
        let ports = |pod: &Value| parse(pod).unwrap().container("a").unwrap().ports.clone();
        assert_eq!(ports(&pod), []);
        for (port, expected) in [
            (json!("http"), vec![8080]),
            (json!(1), vec![]),
            (json!("x"), vec![]),
        ] {
            pod["spec"]["containers"][1]["lifecycle"] = json!({"preStop": {"httpGet": {"port": port}}});
            let numbers: Vec<_> = ports(&pod).iter().map(|port| port.number).collect();
            assert_eq!(numbers, expected, "{port}");
        }
    }

    /// Each of these would cost the daemon many times what it costs its author.
    #[test]
    fn oversized_pod_is_rejected() {
        let oversized_pod = |key: &str, value: Value| {
            let mut pod = pod();
            pod["metadata"]["annotations"] =
                json!({"kruise.io/sidecarset-hash": "{}", "long": "x".repeat(100_000)});
            pod["spec"][key] = value;
            pod
        };
        let hook = |bytes: usize| {
            let command = "x".repeat(bytes);
            json!([{"name": "a", "lifecycle": {"preStop": {"exec": {"command": [command]}}}}])
        };
        let from =
            json!({"name": "V", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['long']"}}});
        let taken = |times: usize| json!([{"name": "a", "env": vec![from.clone(); times]}]);
        let containers = |number: usize| {
            let names = (0..number).map(|n| json!({"name": format!("c{n}")}));
            names.collect::<Vec<_>>()
        };
        for (good, bad, why) in [
            (hook(60_000), hook(70_000), "preStop hooks"),
            (taken(2), taken(3), "labels and annotations"),
            (json!(containers(498)), json!(containers(499)), "containers"),
        ] {
            parse(&oversized_pod("containers", good)).unwrap();
            let mut pod = oversized_pod("containers", bad);
            let error = parse(&pod).unwrap_err();
            assert!(error.contains(why), "{error}");
            pod["status"]["phase"] = json!("Failed");
            assert_eq!(parse(&pod).is_ok(), why != "containers", "{why}: it runs no more");
        }
        // Fields that are not used may be long, and are not kept.
        let mut pod = pod();
        let parsed = parse(&pod).unwrap();
        pod["spec"]["containers"][0]["args"] = json!(vec!["x"; 100_000]);
        pod["spec"]["volumes"] = json!([7]);
        assert_eq!(parse(&pod).unwrap(), parsed);
    }
}

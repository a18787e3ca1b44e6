//! The Pods of this node, reduced to what the duties look at.
//!
//! A mirror of these costs a fraction of the Pods themselves: no managed fields or volumes, and of labels,
//! annotations and environment only what [`MetaView`] says.

mod meta;
mod restart;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use kube::Api;
use kube::api::ListParams;

use crate::cluster::{Cluster, Mirror, Readable, readable};

pub use meta::{MetaView, Variable, Wanted};
pub use restart::{RestartPolicy, Rule, RuledPod};

/// A Pod of this node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; another Pod of the same name has another one.
    pub uid: String,
    /// The UID that the runtime knows its containers by: its own but for a static Pod, which the API server has a mirror
    /// of with another UID.
    pub runtime_uid: String,
    /// The node that it is bound to.
    pub node: String,
    /// Whether its deletion has been asked for.
    pub deleting: bool,
    /// Whether it has ended for good (phase Succeeded or Failed).
    pub ended: bool,
    /// When its containers start again after they have ended.
    pub restart: RestartPolicy,
    /// Whether kubelet says that it starts all of its containers again (condition `AllContainersRestarting`).
    pub restarting_all: bool,
    /// Seconds that its containers get to stop; kubelet's 30 where the Pod does not say.
    pub grace_seconds: i64,
    /// Its addresses, primary first; the node's where it uses the host's network.
    pub ips: Vec<String>,
    /// Its containers and init containers, in the order of its spec.
    pub containers: Vec<ContainerView>,
    /// What is told of its containers, if anything is.
    pub meta: Option<Box<MetaView>>,
}

/// What a container of a Pod is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// One of `spec.containers`.
    #[default]
    Main,
    /// One of `spec.initContainers` with `restartPolicy: Always`: a native sidecar.
    Sidecar,
    /// One of `spec.initContainers` that ends before the main ones begin.
    Init,
}

/// One container of a Pod: what its spec asks for and what kubelet says of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerView {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its ports, for hooks that name one.
    pub ports: Vec<Port>,
    /// What is to be run before it is stopped.
    pub pre_stop: Option<core::LifecycleHandler>,
    /// Its own restart policy, which goes before the Pod's.
    pub restart: Option<RestartPolicy>,
    /// The rules that go before either.
    pub rules: Vec<Rule>,
    /// What kubelet said last; nothing before the first report.
    pub status: Option<StatusView>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Its name, or empty.
    pub name: String,
    /// Its number.
    pub number: i32,
}

/// What kubelet says of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StatusView {
    /// `RUNTIME://ID` of the newest container; empty before there is one.
    pub container_id: String,
    /// Whether it is ready: it runs and its readiness probe, if any, says so.
    pub ready: bool,
    /// How often it was started again.
    pub restart_count: i32,
    /// Whether it runs.
    pub running: bool,
    /// Why it does not run, where kubelet holds it back: the reason and the message of state `waiting`.
    pub waiting: Option<(String, String)>,
    /// How this container ended, or the one before it.
    pub ended: Option<Ended>,
}

/// How a container ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code.
    pub code: i32,
    /// When it was started, by the node's clock.
    pub started: Option<Timestamp>,
    /// When it ended, by the node's clock.
    pub finished: Option<Timestamp>,
}

/// The longest span that a number of an object can ask for: a year, far below where sums of spans overflow and where gRPC
/// has no way to write them (1e8 hours).
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// Seconds of a field of an object, between none and a year.
#[must_use]
pub fn seconds(number: i64) -> Duration {
    Duration::from_secs(u64::try_from(number).unwrap_or(0)).min(LONGEST)
}

/// Labels that kubelet leaves on its containers in the runtime.
const POD_UID: &str = "io.kubernetes.pod.uid";
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";

/// Annotations of kubelet on the mirror of a static Pod, and of that Pod itself: its UID in the runtime.
const MIRROR: &str = "kubernetes.io/config.mirror";
const CONFIG_HASH: &str = "kubernetes.io/config.hash";

/// Condition of a Pod, since Kubernetes 1.35.
const ALL_RESTARTING: &str = "AllContainersRestarting";

/// A mirror of the Pods on `node`, and the task that keeps it up to date.
pub fn watch(cluster: &Cluster, node: &str) -> (Mirror<PodView>, impl Future<Output = ()> + Send + use<>) {
    let api: Api<Readable<RuledPod>> = Api::all(cluster.client.clone());
    let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let view = readable(&cluster.events, |pod| Some(PodView::of(pod)));
    cluster.mirror(api, here, view)
}

impl PodView {
    /// The container of that name.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&ContainerView> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// Whether a container with these labels in the runtime is the Pod's. Whoever creates Pods may call one of theirs a
    /// mirror, so there name and namespace have to be right, too.
    #[must_use]
    pub fn owns(&self, labels: &BTreeMap<String, String>) -> bool {
        let is = |key: &str, value: &str| labels.get(key).is_some_and(|label| label == value);
        let named = is(POD_NAME, &self.name) && is(POD_NAMESPACE, &self.namespace);
        is(POD_UID, &self.runtime_uid) && (self.runtime_uid == self.uid || named)
    }

    /// A container of the Pod, as events name it.
    #[must_use]
    pub fn reference(&self, container: &str) -> core::ObjectReference {
        let list = match self.container(container).map(|view| view.role) {
            Some(Role::Init | Role::Sidecar) => "initContainers",
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

    /// Reduces a Pod to this.
    #[must_use]
    pub fn of(pod: RuledPod) -> Self {
        let RuledPod { pod, mut rules } = pod;
        let spec = pod.spec.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let meta = MetaView::of(&pod.metadata, &spec, &status);
        let uid = pod.metadata.uid.unwrap_or_default();
        let annotations = pod.metadata.annotations.unwrap_or_default();
        let own = annotations.get(MIRROR).and_then(|_| annotations.get(CONFIG_HASH));
        let runtime_uid = own.unwrap_or(&uid).clone();
        let mut conditions = status.conditions.iter().flatten();
        let restarting_all = conditions.any(|c| c.type_ == ALL_RESTARTING && c.status == "True");
        let mut statuses = status.container_statuses.unwrap_or_default();
        statuses.extend(status.init_container_statuses.unwrap_or_default());
        let init = spec.init_containers.unwrap_or_default().into_iter().map(|c| {
            let role = match c.restart_policy.as_deref() {
                Some("Always") => Role::Sidecar,
                _ => Role::Init,
            };
            (c, role)
        });
        let main = spec.containers.into_iter().map(|c| (c, Role::Main));
        Self {
            meta,
            namespace: pod.metadata.namespace.unwrap_or_default(),
            name: pod.metadata.name.unwrap_or_default(),
            uid,
            runtime_uid,
            node: spec.node_name.unwrap_or_default(),
            deleting: pod.metadata.deletion_timestamp.is_some(),
            ended: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            restart: RestartPolicy::of(spec.restart_policy.as_deref()).unwrap_or_default(),
            restarting_all,
            grace_seconds: spec.termination_grace_period_seconds.unwrap_or(30),
            ips: ips(status.pod_ips, status.pod_ip),
            containers: init
                .chain(main)
                .map(|(container, role)| {
                    let rules = rules.remove(&container.name).unwrap_or_default();
                    ContainerView::of(container, role, rules, &statuses)
                })
                .collect(),
        }
    }
}

fn ips(all: Option<Vec<core::PodIP>>, first: Option<String>) -> Vec<String> {
    let mut ips: Vec<String> = all.unwrap_or_default().into_iter().map(|ip| ip.ip).collect();
    if ips.is_empty() {
        ips.extend(first.filter(|ip| !ip.is_empty()));
    }
    ips
}

impl ContainerView {
    fn of(
        container: core::Container,
        role: Role,
        rules: Vec<Rule>,
        statuses: &[core::ContainerStatus],
    ) -> Self {
        let status = statuses.iter().find(|status| status.name == container.name);
        Self {
            role,
            ports: container
                .ports
                .unwrap_or_default()
                .into_iter()
                .map(|port| Port {
                    name: port.name.unwrap_or_default(),
                    number: port.container_port,
                })
                .collect(),
            pre_stop: container.lifecycle.and_then(|lifecycle| lifecycle.pre_stop),
            restart: RestartPolicy::of(container.restart_policy.as_deref()),
            rules,
            status: status.map(StatusView::of),
            name: container.name,
        }
    }
}

impl StatusView {
    fn of(status: &core::ContainerStatus) -> Self {
        let state = status.state.as_ref();
        let last = status.last_state.as_ref();
        let ended = state
            .and_then(|state| state.terminated.as_ref())
            .or_else(|| last.and_then(|state| state.terminated.as_ref()));
        let waiting = state.and_then(|state| state.waiting.as_ref());
        Self {
            container_id: status.container_id.clone().unwrap_or_default(),
            ready: status.ready,
            restart_count: status.restart_count,
            running: state.is_some_and(|state| state.running.is_some()),
            waiting: waiting.map(|waiting| {
                let word = |text: &Option<String>| text.clone().unwrap_or_default();
                (word(&waiting.reason), word(&waiting.message))
            }),
            ended: ended.map(|end| Ended {
                code: end.exit_code,
                started: end.started_at.as_ref().map(|time| time.0),
                finished: end.finished_at.as_ref().map(|time| time.0),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    /// Four containers of three roles, whose statuses come in another order than their specs.
    fn pod() -> RuledPod {
        let pod = serde_json::from_value(json!({
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
        }));
        RuledPod {
            pod: pod.unwrap(),
            ..RuledPod::default()
        }
    }

    #[test]
    fn containers_of_a_static_pod_go_by_its_own_uid() {
        let mut pod = pod();
        assert_eq!(PodView::of(pod.clone()).runtime_uid, "u1");
        let hash = ("kubernetes.io/config.hash".to_owned(), "static".to_owned());
        pod.pod.metadata.annotations = Some([hash.clone()].into());
        assert_eq!(
            PodView::of(pod.clone()).runtime_uid,
            "u1",
            "anybody may write one of them"
        );
        pod.pod.metadata.annotations = Some(
            [
                hash,
                ("kubernetes.io/config.mirror".to_owned(), "static".to_owned()),
            ]
            .into(),
        );
        let view = PodView::of(pod);
        assert_eq!((view.uid.as_str(), view.runtime_uid.as_str()), ("u1", "static"));
        let owns = |labels: &[(&str, &str)]| {
            let labels = labels
                .iter()
                .map(|(k, v)| (format!("io.kubernetes.pod.{k}"), (*v).to_owned()));
            view.owns(&labels.collect())
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
    fn a_pod_is_reduced_by_name_not_by_position() {
        let view = PodView::of(pod());
        assert!(view.deleting && !view.ended);
        assert_eq!((view.restart, view.grace_seconds), (RestartPolicy::OnFailure, 7));
        assert_eq!(view.ips, ["10.0.0.9"]);
        let roles: Vec<_> = view
            .containers
            .iter()
            .map(|c| (c.name.as_str(), c.role))
            .collect();
        let want = [
            ("setup", Role::Init),
            ("mesh", Role::Sidecar),
            ("b", Role::Main),
            ("a", Role::Main),
        ];
        assert_eq!(roles, want);
        let a = view.container("a").unwrap();
        assert_eq!(a.ports[0].number, 8080);
        let status = a.status.as_ref().unwrap();
        assert_eq!(
            (status.container_id.as_str(), status.ready),
            ("containerd://aaa", true)
        );
        assert_eq!(status.ended.unwrap().code, 3);
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
}

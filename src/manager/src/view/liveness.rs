//! A Pod whose liveness probes the daemon runs, and the workload that controls it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;
use serde_json::Value;

use super::ports::{NamedPort, with_port_number};
use kruise_api::keys;
use kruise_api::node_pod_probe::{ContainerProbe, MAX_PROBES_OF_POD, liveness_name};
use kruise_api::owner::{Owner, controller_of_our_group};

/// Bytes of the annotation that are read: as many as the probes of a Pod may have in a NodePodProbe.
const MAX_CONTEXT_BYTES: usize = 16 << 10;
/// Kubelet's defaults of a probe.
const DEFAULT_PERIOD_SECONDS: i32 = 10;
const DEFAULT_TIMEOUT_SECONDS: i32 = 1;
const DEFAULT_FAILURE_THRESHOLD: i32 = 3;
/// Grace period of a Pod without one, in seconds.
const DEFAULT_GRACE_SECONDS: i64 = 30;

/// A workload of our API group, in the namespace of the Pods that it controls.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Workload {
    /// Its kind as the reference names it, such as `CloneSet`.
    pub kind: String,
    /// The workload.
    pub owner: Owner,
}

/// What the manager caches of a Pod with annotation [`keys::CONTAINER_PROBE_CONTEXT`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LivenessPod {
    /// The probes, with numbers of ports and kubelet's defaults, and with the names that they have in a NodePodProbe.
    pub probes: Arc<[ContainerProbe]>,
    /// What of the annotation cannot be used, for humans.
    pub unusable: Box<[String]>,
    /// Grace period of the Pod, in seconds.
    pub grace_period_seconds: i64,
}

/// An entry of the annotation.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    name: String,
    liveness_probe: Probe,
}

impl Workload {
    /// The controller in `metadata.ownerReferences` (JSON), if it is of our API group.
    pub(super) fn from_references(references: &Value) -> Option<Self> {
        let controller = controller_of_our_group(references)?;
        Some(Self {
            kind: controller["kind"].as_str().unwrap_or_default().to_owned(),
            owner: Owner::controller_from_json(references)?,
        })
    }
}

impl LivenessPod {
    /// Reads the annotation of a Pod (JSON) with these ports; `None` without the annotation.
    pub(super) fn from_json(pod: &Value, ports: &[NamedPort]) -> Option<Self> {
        let context = pod["metadata"]["annotations"][keys::CONTAINER_PROBE_CONTEXT].as_str()?;
        let spec = &pod["spec"];
        let (mut probes, mut unusable) = (Vec::<ContainerProbe>::new(), Vec::new());
        match entries(context) {
            Ok(entries) => {
                for entry in entries {
                    let name = entry["name"].as_str().unwrap_or_default().to_owned();
                    let is_first = probes.iter().all(|probe| probe.container_name != name);
                    match container_probe(entry, spec, ports) {
                        Ok(probe) if is_first => probes.push(probe),
                        Ok(_) => {
                            unusable.push(format!("container {name:.64} has more than one liveness probe"))
                        }
                        Err(why) => unusable.push(format!("container {name:.64}: {why}")),
                    }
                }
            }
            Err(why) => unusable.push(why),
        }
        Some(Self {
            probes: probes.into(),
            unusable: unusable.into(),
            grace_period_seconds: spec["terminationGracePeriodSeconds"]
                .as_i64()
                .unwrap_or(DEFAULT_GRACE_SECONDS),
        })
    }

    /// The probe of a container.
    #[must_use]
    pub fn probe(&self, container: &str) -> Option<&ContainerProbe> {
        self.probes.iter().find(|probe| probe.container_name == container)
    }
}

fn entries(context: &str) -> Result<Vec<Value>, String> {
    if context.len() > MAX_CONTEXT_BYTES {
        return Err(format!("it has more than {MAX_CONTEXT_BYTES} bytes"));
    }
    let entries: Vec<Value> =
        serde_json::from_str(context).map_err(|why| format!("it is no JSON list: {why}"))?;
    match entries.len() {
        0..=MAX_PROBES_OF_POD => Ok(entries),
        _ => Err(format!("it has more than {MAX_PROBES_OF_POD} probes")),
    }
}

fn container_probe(entry: Value, spec: &Value, ports: &[NamedPort]) -> Result<ContainerProbe, String> {
    let entry: Entry = serde_json::from_value(entry).map_err(|why| why.to_string())?;
    let mut containers = spec["containers"].as_array().into_iter().flatten();
    if !containers.any(|container| container["name"] == *entry.name) {
        return Err("the Pod has no such container".to_owned());
    }
    let probe = check(entry.liveness_probe)?;
    let probe = with_port_number(probe, &entry.name, ports)
        .ok_or_else(|| "the container has no port of that name".to_owned())?;
    if !has_valid_port(&probe) {
        return Err("a port is a number from 1 to 65535".to_owned());
    }
    Ok(ContainerProbe {
        name: liveness_name(&entry.name),
        container_name: entry.name,
        probe,
    })
}

fn has_valid_port(probe: &Probe) -> bool {
    let http = probe.http_get.as_ref().map(|get| get.port.clone());
    let tcp = probe.tcp_socket.as_ref().map(|tcp| tcp.port.clone());
    let grpc = probe.grpc.as_ref().map(|grpc| IntOrString::Int(grpc.port));
    let mut ports = [http, tcp, grpc].into_iter().flatten();
    ports.all(|port| matches!(port, IntOrString::Int(1..=65_535)))
}

/// The probe with kubelet's defaults, if the daemon can run it and a NodePodProbe can hold it.
fn check(probe: Probe) -> Result<Probe, &'static str> {
    let handlers = [
        probe.exec.is_some(),
        probe.http_get.is_some(),
        probe.tcp_socket.is_some(),
        probe.grpc.is_some(),
    ];
    if handlers.into_iter().filter(|present| *present).count() != 1 {
        return Err("a probe has one of exec, httpGet, tcpSocket and grpc");
    }
    let command = probe
        .exec
        .as_ref()
        .map(|exec| exec.command.as_deref().unwrap_or_default());
    if command.is_some_and(<[String]>::is_empty) {
        return Err("exec has no command");
    }
    let http = probe.http_get.as_ref();
    let hosts = [
        http.and_then(|get| get.host.as_deref()),
        probe.tcp_socket.as_ref().and_then(|tcp| tcp.host.as_deref()),
    ];
    if hosts.into_iter().flatten().any(|host| !host.is_empty()) {
        return Err("a host is not probed, only the address of the Pod");
    }
    let scheme = http.and_then(|get| get.scheme.as_deref()).unwrap_or_default();
    if !["", "HTTP", "HTTPS"].contains(&scheme) {
        return Err("scheme is neither HTTP nor HTTPS");
    }
    let or_default = |value: Option<i32>, default| Some(value.filter(|value| *value > 0).unwrap_or(default));
    Ok(Probe {
        initial_delay_seconds: probe.initial_delay_seconds.filter(|delay| *delay > 0),
        period_seconds: or_default(probe.period_seconds, DEFAULT_PERIOD_SECONDS),
        timeout_seconds: or_default(probe.timeout_seconds, DEFAULT_TIMEOUT_SECONDS),
        // Kubernetes allows no other one for a liveness probe.
        success_threshold: Some(1),
        failure_threshold: or_default(probe.failure_threshold, DEFAULT_FAILURE_THRESHOLD),
        termination_grace_period_seconds: probe.termination_grace_period_seconds.filter(|grace| *grace > 0),
        ..probe
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::{PodView, RawPod};
    use super::*;
    use kruise_workload::pod_admission::enhanced_liveness;

    fn owner(api_version: &str) -> Value {
        json!([{ "apiVersion": api_version, "kind": "CloneSet", "name": "web", "uid": "w", "controller": true }])
    }

    /// A Pod of containers `app` and `log`.
    fn pod(context: &str) -> Value {
        json!({
            "metadata": { "name": "p", "namespace": "n", "uid": "u", "ownerReferences": owner("apps.kruise.io/v1beta1"),
                "annotations": { keys::CONTAINER_PROBE_CONTEXT: context } },
            "spec": { "terminationGracePeriodSeconds": 7, "containers": [
                { "name": "app", "ports": [{ "name": "web", "containerPort": 8080 }] }, { "name": "log" }] },
        })
    }

    /// Reads the Pod as the watch does.
    fn view(pod: &Value) -> PodView {
        let pod: RawPod = serde_json::from_value(pod.clone()).unwrap();
        PodView::from(&pod)
    }

    fn liveness(context: &Value) -> LivenessPod {
        *view(&pod(&context.to_string())).liveness.unwrap()
    }

    #[test]
    fn annotation_of_admission_is_read() {
        let mut created = pod("");
        created["metadata"]["annotations"] = json!({ keys::USING_ENHANCED_LIVENESS: "true" });
        created["spec"]["containers"][0]["livenessProbe"] = json!({
            "httpGet": { "path": "/live", "port": "web" }, "initialDelaySeconds": 5, "terminationGracePeriodSeconds": 3 });
        assert_eq!(view(&created).liveness, None);
        assert!(enhanced_liveness::apply(&mut created));
        let view = view(&created);
        assert_eq!(view.workload.unwrap().owner.name, "web");
        let liveness = view.liveness.unwrap();
        assert_eq!((liveness.unusable.len(), liveness.grace_period_seconds), (0, 7));
        let probe = json!({
            "httpGet": { "path": "/live", "port": 8080 }, "initialDelaySeconds": 5, "periodSeconds": 10,
            "timeoutSeconds": 1, "successThreshold": 1, "failureThreshold": 3, "terminationGracePeriodSeconds": 3 });
        assert_eq!(
            json!(liveness.probe("app")),
            json!({ "name": "EnhancedLivenessProbe#app", "containerName": "app", "probe": probe })
        );
        assert_eq!(liveness.probe("log"), None);
    }

    /// A Pod that refers to a version that is not served takes nothing of the budget of the CloneSet.
    #[test]
    fn workload_is_the_same_in_served_versions_only() {
        let workload = |version: &str| {
            let mut pod = pod("[]");
            pod["metadata"]["ownerReferences"] = owner(&format!("apps.kruise.io/{version}"));
            view(&pod).workload.unwrap()
        };
        assert_eq!(workload("v1beta1"), workload("v1alpha1"));
        assert_ne!(workload("v1beta1"), workload("v9"));
    }

    #[test]
    fn only_pods_of_our_workloads_have_enhanced_liveness() {
        let context = json!([{ "name": "app", "livenessProbe": { "tcpSocket": { "port": 1 } } }]).to_string();
        for (references, expected) in [
            (owner("apps.kruise.io/v1beta1"), true),
            (owner("apps.kruise.io/v1alpha1"), true),
            (owner("apps/v1"), false),
            (json!([]), false),
            (json!("x"), false),
        ] {
            let mut pod = pod(&context);
            pod["metadata"]["ownerReferences"] = references;
            let view = view(&pod);
            assert_eq!(
                (view.workload.is_some(), view.liveness.is_some()),
                (expected, expected)
            );
        }
    }

    #[test]
    fn unusable_probes_are_reported_and_the_others_run() {
        let tcp = json!({ "tcpSocket": { "port": 1 } });
        let cases = [
            (json!({ "name": "app" }), "missing field `livenessProbe`"),
            (json!({ "name": 7, "livenessProbe": tcp }), "invalid type"),
            (
                json!({ "name": "other", "livenessProbe": tcp }),
                "no such container",
            ),
            (
                json!({ "name": "app", "livenessProbe": {} }),
                "one of exec, httpGet",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "tcpSocket": { "port": 1 }, "grpc": { "port": 1 } } }),
                "one of exec, httpGet",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "exec": {} } }),
                "exec has no command",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "tcpSocket": { "port": 1, "host": "10.0.0.1" } } }),
                "a host is not probed",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "httpGet": { "port": 1, "scheme": "x" } } }),
                "neither HTTP nor HTTPS",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "tcpSocket": { "port": "metrics" } } }),
                "no port of that name",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "grpc": { "port": 0 } } }),
                "from 1 to 65535",
            ),
            (
                json!({ "name": "app", "livenessProbe": { "grpc": { "port": i64::MAX } } }),
                "invalid value",
            ),
            (json!({ "name": "log", "livenessProbe": tcp }), "more than one"),
        ];
        for (entry, why) in cases {
            let read = liveness(&json!([{ "name": "log", "livenessProbe": tcp }, entry]));
            assert_eq!(read.probes.len(), 1, "{entry}");
            assert!(
                read.unusable.len() == 1 && read.unusable[0].contains(why),
                "{:?}",
                read.unusable
            );
        }
        let large = format!("[{}]", " ".repeat(MAX_CONTEXT_BYTES));
        let many = json!(vec![json!({}); MAX_PROBES_OF_POD + 1]).to_string();
        for (context, why) in [
            (large.as_str(), "bytes"),
            (&many, "probes"),
            ("{}", "no JSON list"),
            ("", "EOF"),
        ] {
            let read = view(&pod(context)).liveness.unwrap();
            assert!(
                read.probes.is_empty() && read.unusable[0].contains(why),
                "{:?}",
                read.unusable
            );
        }
    }

    proptest! {
        /// Whatever the annotation has, there is at most one probe of a container, and only of the Pod's containers.
        #[test]
        fn probes_are_of_the_containers_of_the_pod(
            names in prop::collection::vec("app|log|x|", 0..8),
            number in any::<i32>(),
            cut in 0_usize..400,
        ) {
            let entry = |name: &String| json!({ "name": name, "livenessProbe": {
                "tcpSocket": { "port": number }, "periodSeconds": number, "failureThreshold": number } });
            let context = json!(names.iter().map(entry).collect::<Vec<_>>()).to_string();
            let cut: String = context.chars().take(cut).collect();
            for context in [context, cut] {
                let read = view(&pod(&context)).liveness.unwrap();
                let containers: Vec<&str> = read.probes.iter().map(|probe| probe.container_name.as_str()).collect();
                let distinct: std::collections::BTreeSet<&&str> = containers.iter().collect();
                prop_assert_eq!(distinct.len(), containers.len());
                prop_assert!(containers.iter().all(|name| ["app", "log"].contains(name)));
                let is_positive = |value: Option<i32>| value.is_some_and(|value| value > 0);
                prop_assert!(read.probes.iter().all(|probe| is_positive(probe.probe.period_seconds)));
            }
        }
    }
}

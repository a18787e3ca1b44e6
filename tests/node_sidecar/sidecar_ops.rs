//! A SidecarSet and one Pod that it selects, in the namespace of one test.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::panic::Location;

use serde_json::{Value, json};
use testbed::wait;

use crate::workloads::{NodeNamespace, TestCluster};

/// A test's namespace and the SidecarSet of the same name.
pub struct SidecarTest<G> {
    pub test: NodeNamespace<G>,
    pub set: String,
}

impl<G: Deref<Target = TestCluster>> SidecarTest<G> {
    /// Creates a set with these containers for Pods `app: web` of the namespace, and waits until Pods are injected.
    pub fn create(test: NodeNamespace<G>, containers: Value, spec: Value) -> Self {
        let this = Self::create_without_wait(test, containers, spec);
        this.wait_dry_run("injected", |pod| {
            pod["spec"]["containers"].as_array().map_or(0, Vec::len) > 1
        });
        this
    }

    /// The same without the wait.
    pub fn create_without_wait(test: NodeNamespace<G>, containers: Value, spec: Value) -> Self {
        let set = format!("set-{}", test.namespace);
        let this = Self { test, set };
        let mut merged = json!({
            "selector": { "matchLabels": { "app": "web" } },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": this.test.namespace } },
            "containers": containers,
        });
        json_patch::merge(&mut merged, &spec);
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": this.set }, "spec": merged });
        this.plane().apply(&object.to_string()).unwrap();
        this
    }

    pub fn plane(&self) -> &testbed::cluster::ControlPlane {
        &self.test.cluster.node.plane
    }

    fn pod_manifest(name: &str) -> Value {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "labels": { "app": "web" } },
            "spec": { "terminationGracePeriodSeconds": 1, "containers": [
                { "name": "app", "image": "kruise-test/term:1", "imagePullPolicy": "IfNotPresent" }] } })
    }

    /// The Pod as it would be created.
    pub fn dry_run(&self) -> Value {
        let file = self.plane().dir().join(format!("{}.json", self.set));
        std::fs::write(&file, Self::pod_manifest("dry").to_string()).unwrap();
        let output = self.test.kubectl(&[
            "create",
            "--dry-run=server",
            "-o",
            "json",
            "-f",
            &file.display().to_string(),
        ]);
        serde_json::from_str(&output).unwrap()
    }

    /// Waits until new Pods are as `predicate` says.
    #[track_caller]
    pub fn wait_dry_run(&self, what: &str, predicate: impl Fn(&Value) -> bool) {
        self.wait_until(&format!("a dry run: {what}"), || {
            predicate(&self.dry_run()).then_some(())
        });
    }

    /// Creates the Pod, and waits until it is ready.
    pub fn create_ready_pod(&self, name: &str) -> Value {
        self.create_ready_pod_with(name, json!({}))
    }

    /// The same; `spec` is merged into its spec.
    pub fn create_ready_pod_with(&self, name: &str, spec: Value) -> Value {
        let mut pod = Self::pod_manifest(name);
        json_patch::merge(&mut pod["spec"], &spec);
        let file = self.plane().dir().join(format!("{}-{name}.json", self.set));
        std::fs::write(&file, pod.to_string()).unwrap();
        self.test.kubectl(&["create", "-f", &file.display().to_string()]);
        self.wait_pod(name, "ready", |pod| condition(pod, "Ready") == "True")
    }

    /// Waits until `predicate` holds for the Pod.
    #[track_caller]
    pub fn wait_pod(&self, name: &str, what: &str, predicate: impl Fn(&Value) -> bool) -> Value {
        self.wait_until(&format!("Pod {name}: {what}"), || {
            let pod = serde_json::from_str(&self.test.kubectl(&["get", "pod", name, "-o", "json"])).unwrap();
            predicate(&pod).then_some(pod)
        })
    }

    /// The set now.
    pub fn get(&self) -> Value {
        let output = self.test.kubectl(&["get", "sidecarset", &self.set, "-o", "json"]);
        serde_json::from_str(&output).unwrap()
    }

    /// Waits until `predicate` holds for a status of the newest spec.
    #[track_caller]
    pub fn wait_status(&self, what: &str, predicate: impl Fn(&Value) -> bool) -> Value {
        self.wait_until(&format!("the status has {what}"), || {
            let set = self.get();
            let current = set["status"]["observedGeneration"] == set["metadata"]["generation"];
            (current && predicate(&set["status"])).then(|| set["status"].clone())
        })
    }

    #[track_caller]
    fn wait_until<T>(&self, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
        let caller = Location::caller();
        wait::until(what, wait::WAIT_TIMEOUT, || Ok(probe())).unwrap_or_else(|why| {
            let pods = self.test.kubectl(&["get", "pods", "-o", "yaml"]);
            panic!(
                "{caller}: {why:#}\n{}\n{pods}\n{}",
                json!(self.get()),
                self.test.tail()
            )
        })
    }

    /// Merges a patch into its spec.
    pub fn patch(&self, spec: Value) {
        let patch = json!({ "spec": spec }).to_string();
        self.test
            .kubectl(&["patch", "sidecarset", &self.set, "--type=merge", "-p", &patch]);
    }
}

/// Status of a Pod's condition; empty if it has none.
pub fn condition<'a>(pod: &'a Value, type_: &str) -> &'a str {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut found = conditions.filter(|condition| condition["type"] == type_);
    found
        .next()
        .and_then(|condition| condition["status"].as_str())
        .unwrap_or_default()
}

/// Container ID and restart count by container.
pub fn containers(pod: &Value) -> BTreeMap<String, (String, i64)> {
    let statuses = pod["status"]["containerStatuses"]
        .as_array()
        .into_iter()
        .flatten();
    let entry = |status: &Value| {
        let text = |field: &str| status[field].as_str().unwrap_or_default().to_owned();
        (
            text("name"),
            (
                text("containerID"),
                status["restartCount"].as_i64().unwrap_or_default(),
            ),
        )
    };
    statuses.map(entry).collect()
}

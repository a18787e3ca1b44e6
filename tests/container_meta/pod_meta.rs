//! Pods with container metadata, and helpers to read it.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::in_place::{RuntimeContainerMeta, RuntimeContainerMetaSet};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::fixture::{DaemonCluster, TestNamespace, container_statuses};

pub const META_ANNOTATION: &str = "apps.kruise.io/runtime-containers-meta";

/// A variable whose value comes from an annotation.
pub fn env_from_annotation(name: &str, key: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": format!("metadata.annotations['{key}']")}}})
}

/// A variable whose value comes from a label.
pub fn env_from_label(name: &str, key: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": format!("metadata.labels['{key}']")}}})
}

/// A container that writes its `CFG` to `/log/POD-NAME.env` and ends at TERM, after `SECONDS` if that is set.
pub fn container(name: &str, env: &[Value]) -> Value {
    let script = format!(
        "printf '%s\\0' \"$CFG\" >> /log/$HOSTNAME-{name}.env; \
         trap 'touch /log/{name}.term; sleep ${{SECONDS_TO_STOP:-0}}; exit 0' TERM; \
         while :; do sleep 3600 & wait $!; done"
    );
    json!({"name": name, "image": "busybox:1.36", "command": ["sh", "-c", script], "env": env})
}

/// A Pod and the metadata of its containers.
pub struct PodMeta {
    pub pod: Pod,
    set: RuntimeContainerMetaSet,
}

impl PodMeta {
    fn parse(pod: &Pod) -> Option<Self> {
        let text = pod.annotations().get(META_ANNOTATION)?;
        let set = serde_json::from_str(text).unwrap();
        Some(Self {
            pod: pod.clone(),
            set,
        })
    }

    fn entry(&self, name: &str) -> Option<&RuntimeContainerMeta> {
        self.set.containers.iter().find(|entry| entry.name == name)
    }

    /// Plain hash and environment hash of the running container.
    pub fn hashes(&self, name: &str) -> (u64, u64) {
        let entry = self.entry(name).expect("the container has metadata");
        let status = &container_statuses(&self.pod)[name];
        assert_eq!(
            (&entry.container_id, entry.restart_count),
            (&status.id, status.restarts)
        );
        (
            entry.hashes.plain_hash,
            entry.hashes.extracted_env_from_metadata_hash,
        )
    }
}

/// What tests of this target do with a Pod.
pub trait PodMetaOps {
    /// Creates a Pod that carries sidecars, annotation `cfg: 1` and label `ver: v1`, and waits until it is ready.
    async fn create_meta_pod(&self, name: &str, containers: Value, metadata: Value) -> Pod;
    /// Creates a Pod of one container with only that metadata, and waits until it is ready.
    async fn create_plain_pod(&self, name: &str, metadata: Value) -> Pod;
    /// Waits until there is metadata and `predicate` holds.
    async fn wait_meta(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&Pod, &RuntimeContainerMetaSet) -> bool,
    ) -> PodMeta;
    /// Waits until a container has been restarted `times` times, is ready, and has metadata.
    async fn wait_restarted(&self, name: &str, container: &str, times: i32) -> PodMeta;
    /// Sets what a workload sets when it starts an in-place update.
    async fn begin_update(&self, name: &str);
    async fn patch_pod(&self, name: &str, patch: Value);
    /// The daemon's writes to the Pod that the API server accepted.
    fn daemon_writes(&self, name: &str) -> usize;
    /// Values of `CFG` that the containers had, one after the other.
    fn recorded_env(&self, container: &str) -> Vec<String>;
    /// The lines of a file in the log folder.
    fn log_lines(&self, file: &str) -> Vec<String>;
}

impl<G: std::ops::Deref<Target = DaemonCluster>> PodMetaOps for TestNamespace<G> {
    async fn create_meta_pod(&self, name: &str, containers: Value, metadata: Value) -> Pod {
        let mut merged_metadata =
            json!({"labels": {"ver": "v1"}, "annotations": {"cfg": "1", "kruise.io/sidecarset-hash": "{}"}});
        merged_metadata["name"] = json!(name);
        json_patch::merge(&mut merged_metadata, &metadata);
        self.create_pod_with(merged_metadata, containers, json!({})).await
    }

    async fn create_plain_pod(&self, name: &str, mut metadata: Value) -> Pod {
        metadata["name"] = json!(name);
        self.create_pod_with(metadata, json!([container("main", &[])]), json!({}))
            .await
    }

    async fn wait_meta(
        &self,
        name: &str,
        what: &str,
        predicate: impl Fn(&Pod, &RuntimeContainerMetaSet) -> bool,
    ) -> PodMeta {
        let matches = |pod: &Pod| PodMeta::parse(pod).is_some_and(|seen| predicate(pod, &seen.set));
        let (pod, _) = self.watch_until(name, what, matches).await;
        PodMeta::parse(&pod).unwrap()
    }

    async fn wait_restarted(&self, name: &str, container: &str, times: i32) -> PodMeta {
        let what = format!("{container} restarted {times} times and told of");
        let predicate = |pod: &Pod, set: &RuntimeContainerMetaSet| {
            let status = &container_statuses(pod)[container];
            assert!(
                status.restarts <= times,
                "{container} was restarted too often: {status:?}"
            );
            let is_recorded = set.containers.iter().any(|entry| entry.container_id == status.id);
            status.restarts == times && status.ready && is_recorded
        };
        self.wait_meta(name, &what, predicate).await
    }

    async fn begin_update(&self, name: &str) {
        let condition =
            json!({"type": "InPlaceUpdateReady", "status": "False", "reason": "StartInPlaceUpdate"});
        self.patch_status::<Pod>(name, json!({"status": {"conditions": [condition]}}))
            .await;
    }

    async fn patch_pod(&self, name: &str, patch: Value) {
        let patch = Patch::Strategic(patch);
        self.api::<Pod>()
            .patch(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    fn daemon_writes(&self, name: &str) -> usize {
        let is_daemon_write = |write: &&Value| {
            let object = &write["objectRef"];
            write["user"]["username"] == "system:serviceaccount:kruise-system:kruise-daemon"
                && object["resource"] == "pods"
                && object["namespace"] == self.namespace.as_str()
                && object["name"] == name
        };
        let writes = self.cluster.node.plane.audited_writes().unwrap();
        let refused = |write: &&Value| write["responseStatus"]["code"].as_i64() >= Some(300);
        let refused_writes: Vec<_> = writes.iter().filter(is_daemon_write).filter(refused).collect();
        assert!(refused_writes.is_empty(), "refused: {refused_writes:#?}");
        writes.iter().filter(is_daemon_write).count()
    }

    fn recorded_env(&self, container: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.log_dir.join(format!("{container}.env"))).unwrap();
        text.split_terminator('\0').map(str::to_owned).collect()
    }

    fn log_lines(&self, file: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.log_dir.join(file)).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

//! CloneSets with templates as in charts, the ways in which manifests are applied, and what none of these may change.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use kruise_api::cloneset::CloneSet;
use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use serde::Deserialize;
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use super::untyped::untyped;
use super::waits;

/// A template, as in the files of `tests/data/templates`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chart {
    name: String,
    template: Value,
    #[serde(default)]
    volume_claim_templates: Vec<Value>,
}

impl Chart {
    /// The templates of a file.
    pub fn parse_all(text: &str) -> Vec<Self> {
        let documents = serde_yaml::Deserializer::from_str(text);
        documents
            .map(|document| Self::deserialize(document).unwrap())
            .collect()
    }
}

/// A namespace with a CloneSet of one Pod for each template, in one API version.
pub struct Charts {
    admin: Cluster,
    pub namespace: &'static str,
    version: &'static str,
    charts: Vec<Chart>,
}

/// How the same manifests are applied again.
#[derive(Clone, Copy, Debug)]
pub enum ApplyMethod {
    ClientSide,
    /// A merge patch from the last applied manifest, the new one and the live object, as GitOps tools create it.
    ThreeWay,
    ServerSide,
    /// It removes the last applied configuration from the object.
    Replace,
}

impl ApplyMethod {
    pub const ALL: [Self; 4] = [Self::ClientSide, Self::ThreeWay, Self::ServerSide, Self::Replace];
}

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The merge patch from one value to another.
fn merge_patch(from: &Value, to: &Value) -> Value {
    let (Some(from), Some(to)) = (from.as_object(), to.as_object()) else {
        return to.clone();
    };
    let removed = from.keys().filter(|key| !to.contains_key(*key));
    let removed = removed.map(|key| (key.clone(), Value::Null));
    let new = to.iter().filter_map(|(key, value)| match from.get(key) {
        Some(before) if before == value => None,
        before => Some((key.clone(), merge_patch(before.unwrap_or(&Value::Null), value))),
    });
    Value::Object(removed.chain(new).collect())
}

/// The deletions of a merge patch, or the values that it sets.
fn split_patch(patch: &Value, deletions: bool) -> Option<Value> {
    match patch {
        Value::Null => deletions.then_some(Value::Null),
        Value::Object(all) => {
            let parts = all
                .iter()
                .filter_map(|(key, value)| Some((key.clone(), split_patch(value, deletions)?)));
            Some(Value::Object(parts.collect()))
        }
        other => (!deletions).then(|| other.clone()),
    }
}

/// The patch that kubectl sends for a kind that it does not know: what the manifest adds or changes in the live object,
/// and deletes from the last applied one.
fn three_way_patch(original: &Value, modified: &Value, live: &Value) -> Value {
    let mut patch = split_patch(&merge_patch(original, modified), true).unwrap_or_default();
    let set = split_patch(&merge_patch(live, modified), false).unwrap_or_default();
    json_patch::merge(&mut patch, &set);
    patch
}

/// Unchanged as long as no Pod is replaced and no revision is added.
#[derive(Debug, PartialEq, Eq)]
pub struct StableIdentities {
    /// UID of each Pod.
    pub pods: BTreeMap<String, String>,
    /// UID of each claim.
    pub claims: BTreeMap<String, String>,
    pub revisions: BTreeSet<String>,
    /// Restarts of each container, by Pod and container; if a kubelet runs them.
    pub restarts: BTreeMap<(String, String), i64>,
}

/// Restart count of each container.
fn restart_counts(pods: &[DynamicObject]) -> BTreeMap<(String, String), i64> {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let status_lists = pods
        .iter()
        .flat_map(|pod| lists.map(|list| (pod, &pod.data["status"][list])));
    let all = status_lists.flat_map(|(pod, list)| {
        let statuses = list.as_array().into_iter().flatten();
        statuses.map(|status| {
            let name = status["name"].as_str().unwrap().to_owned();
            (
                (pod.metadata.name.clone().unwrap(), name),
                status["restartCount"].as_i64().unwrap(),
            )
        })
    });
    all.collect()
}

impl Charts {
    /// All templates of `tests/data/templates`.
    pub fn new(
        plane: &ControlPlane,
        admin: &Cluster,
        namespace: &'static str,
        version: &'static str,
    ) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join("tests/data/templates");
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().path())
            .collect();
        files.sort();
        let texts = files
            .into_iter()
            .map(|file| std::fs::read_to_string(file).unwrap());
        let charts: Vec<Chart> = texts.flat_map(|text| Chart::parse_all(&text)).collect();
        assert!(charts.len() > 40);
        Self::with_charts(plane, admin, (namespace, version), charts)
    }

    /// Creates the namespace, with everything that Pods of the templates need.
    pub fn with_charts(
        plane: &ControlPlane,
        admin: &Cluster,
        (namespace, version): (&'static str, &'static str),
        charts: Vec<Chart>,
    ) -> Self {
        let charts = Self {
            admin: admin.clone(),
            namespace,
            version,
            charts,
        };
        plane.apply(&charts.prerequisites()).unwrap();
        charts
    }

    fn prerequisites(&self) -> String {
        let named = |api: &str, kind: &str, name: &str| json!({ "apiVersion": api, "kind": kind, "metadata": { "name": name } });
        // The namespace comes first.
        let mut objects = BTreeMap::from([(String::new(), named("v1", "Namespace", self.namespace))]);
        let mut account = |name: &str| {
            let mut account = named("v1", "ServiceAccount", name);
            account["metadata"]["namespace"] = json!(self.namespace);
            objects.insert(format!("{name} account"), account);
        };
        account("default");
        for chart in &self.charts {
            let spec = &chart.template["spec"];
            let names = ["serviceAccountName", "serviceAccount"].map(|field| spec[field].as_str());
            names.into_iter().flatten().for_each(&mut account);
        }
        for chart in &self.charts {
            let spec = &chart.template["spec"];
            if let Some(name) = spec["priorityClassName"]
                .as_str()
                .filter(|name| !name.starts_with("system-"))
            {
                let mut class = named("scheduling.k8s.io/v1", "PriorityClass", name);
                class["value"] = json!(100);
                objects.insert(format!("{name} priority"), class);
            }
            if let Some(name) = spec["runtimeClassName"].as_str() {
                let mut class = named("node.k8s.io/v1", "RuntimeClass", name);
                class["handler"] = json!("runc");
                objects.insert(format!("{name} runtime"), class);
            }
        }
        let documents: Vec<String> = objects.into_values().map(|object| object.to_string()).collect();
        documents.join("\n---\n")
    }

    fn manifest(&self, chart: &Chart, image: Option<&str>) -> Value {
        let strategy = match self.version {
            "v1alpha1" => json!({ "type": "InPlaceIfPossible", "maxUnavailable": "100%" }),
            _ => json!({ "type": "RollingUpdate", "rollingUpdate": {
                "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } }),
        };
        let mut template = chart.template.clone();
        if let Some(image) = image {
            template["spec"]["containers"][0]["image"] = json!(image);
        }
        let mut spec = json!({
            "replicas": 1,
            "selector": { "matchLabels": template["metadata"]["labels"] },
            "template": template,
            "updateStrategy": strategy,
        });
        if !chart.volume_claim_templates.is_empty() {
            spec["volumeClaimTemplates"] = json!(chart.volume_claim_templates);
        }
        json!({
            "apiVersion": format!("apps.kruise.io/{}", self.version), "kind": "CloneSet",
            "metadata": { "name": chart.name, "namespace": self.namespace }, "spec": spec,
        })
    }

    /// Applies all manifests, with this image in each first container.
    pub async fn apply_all(&self, plane: &ControlPlane, method: ApplyMethod, image: Option<&str>) {
        let items: Vec<Value> = self
            .charts
            .iter()
            .map(|chart| self.manifest(chart, image))
            .collect();
        let verb: &[&str] = match method {
            ApplyMethod::ClientSide => &["apply"],
            ApplyMethod::ServerSide => &["apply", "--server-side", "--force-conflicts"],
            ApplyMethod::Replace => &["replace"],
            ApplyMethod::ThreeWay => {
                let sets = self.api("apps.kruise.io", self.version, "CloneSet");
                for mut item in items {
                    let name = item["metadata"]["name"].as_str().unwrap().to_owned();
                    let live = json!(sets.get(&name).await.unwrap());
                    let last_applied_text = &live["metadata"]["annotations"][LAST_APPLIED];
                    let last_applied: Value =
                        serde_json::from_str(last_applied_text.as_str().unwrap()).unwrap();
                    item["metadata"]["annotations"][LAST_APPLIED] = json!(item.to_string() + "\n");
                    let patch = Patch::Merge(three_way_patch(&last_applied, &item, &live));
                    let params = PatchParams::default();
                    sets.patch(&name, &params, &patch).await.unwrap();
                }
                return;
            }
        };
        let file = plane.dir().join(format!("{}.json", self.namespace));
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
        std::fs::write(&file, list.to_string()).unwrap();
        let file = file.display().to_string();
        let what = ["--namespace", self.namespace, "-f", file.as_str()];
        plane.kubectl(&[verb, &what[..]].concat()).unwrap();
    }

    fn api(&self, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
        untyped(&self.admin, group, version, kind, Some(self.namespace))
    }

    /// Waits until each CloneSet's status has observed its newest spec, and its Pod has the newest revision.
    pub async fn wait_observed(&self, what: &str) {
        let sets: Api<CloneSet> = Api::namespaced(self.admin.client.clone(), self.namespace);
        let what = format!("{}: {what}: all CloneSets are seen to", self.namespace);
        let is_observed = |set: &CloneSet| {
            let status = set.status.as_ref();
            status
                .is_some_and(|s| s.observed_generation == set.metadata.generation && s.updated_replicas == 1)
        };
        let poll = || async {
            let all = sets.list(&ListParams::default()).await.unwrap().items;
            (all.len() == self.charts.len() && all.iter().all(is_observed)).then_some(())
        };
        waits::poll_until(&what, &String::new, poll).await;
    }

    /// Waits until each template is stored with defaults.
    pub async fn wait_defaulted(&self) {
        let sets: Api<CloneSet> = Api::namespaced(self.admin.client.clone(), self.namespace);
        let what = format!("{}: all templates have defaults", self.namespace);
        let has_defaults = |set: &CloneSet| {
            let spec = &set.spec.template["spec"];
            let mut containers = spec["containers"].as_array().into_iter().flatten();
            spec["dnsPolicy"].is_string() && containers.all(|one| one["imagePullPolicy"].is_string())
        };
        let poll = || async {
            let all = sets.list(&ListParams::default()).await.unwrap().items;
            all.iter().all(has_defaults).then_some(())
        };
        waits::poll_until(&what, &String::new, poll).await;
    }

    pub async fn stable_identities(&self) -> StableIdentities {
        let uids = |objects: Vec<DynamicObject>| -> BTreeMap<String, String> {
            let pairs = objects
                .into_iter()
                .map(|one| (one.metadata.name.unwrap(), one.metadata.uid.unwrap()));
            pairs.collect()
        };
        let pods = self.list("", "Pod").await;
        let marked_for_deletion: Vec<_> = pods
            .iter()
            .filter(|pod| {
                pod.metadata
                    .labels
                    .iter()
                    .flatten()
                    .any(|(key, _)| key.ends_with("/specified-delete"))
            })
            .map(|pod| &pod.metadata.name)
            .collect();
        assert!(
            marked_for_deletion.is_empty(),
            "{}: to be replaced: {marked_for_deletion:?}",
            self.namespace
        );
        StableIdentities {
            restarts: restart_counts(&pods),
            pods: uids(pods),
            claims: uids(self.list("", "PersistentVolumeClaim").await),
            revisions: uids(self.list("apps", "ControllerRevision").await)
                .into_keys()
                .collect(),
        }
    }

    async fn list(&self, group: &str, kind: &str) -> Vec<DynamicObject> {
        self.api(group, "v1", kind)
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
    }

    /// Waits until each Pod is available, if a kubelet runs them.
    pub async fn wait_available(&self, plane: &ControlPlane, what: &str) {
        let sets: Api<CloneSet> = Api::namespaced(self.admin.client.clone(), self.namespace);
        let what = format!("{}: {what}: all Pods are available", self.namespace);
        let is_available = |set: &CloneSet| {
            set.status
                .as_ref()
                .is_some_and(|status| status.available_replicas == 1)
        };
        let poll = || async {
            let all = sets.list(&ListParams::default()).await.unwrap().items;
            all.iter().all(is_available).then_some(())
        };
        // The state of the others.
        let pods = || {
            let pods = ["describe", "pods", "--namespace", self.namespace];
            plane.kubectl(&pods).unwrap()
        };
        waits::poll_until(&what, &pods, poll).await;
    }

    /// Applies all manifests in each way, and asserts that nothing changes.
    pub async fn assert_reapply_is_noop(&self, plane: &ControlPlane, image: Option<&str>, what: &str) {
        self.wait_observed(what).await;
        let before = self.stable_identities().await;
        for how in ApplyMethod::ALL {
            let what = format!("{what}, {how:?}");
            self.apply_all(plane, how, image).await;
            self.wait_observed(&what).await;
            assert_eq!(
                self.stable_identities().await,
                before,
                "{}: {what}",
                self.namespace
            );
        }
    }

    /// Sets another image in all first containers, and asserts that their Pods are kept and each set has one more
    /// revision.
    pub async fn assert_in_place_image_update(&self, plane: &ControlPlane, image: &str, what: &str) {
        let before = self.stable_identities().await;
        self.apply_all(plane, ApplyMethod::ClientSide, Some(image)).await;
        self.wait_observed(what).await;
        let after = self.stable_identities().await;
        assert_eq!(
            (&after.pods, &after.claims),
            (&before.pods, &before.claims),
            "{}: {what}",
            self.namespace
        );
        assert!(after.revisions.is_superset(&before.revisions));
        assert_eq!(
            after.revisions.len(),
            before.revisions.len() + self.charts.len(),
            "{what}"
        );
        for pod in self.list("", "Pod").await {
            assert_eq!(
                pod.data["spec"]["containers"][0]["image"], image,
                "{:?}",
                pod.metadata.name
            );
        }
    }

    /// Restores objects of `tests/data/takeover` as another program left them; no manager may run.
    pub async fn restore(&self, recorded: &str) {
        assert_eq!(recorded.lines().count(), self.charts.len());
        for line in recorded.lines() {
            let mut line: Value = serde_json::from_str(&line.replace("NAMESPACE", self.namespace)).unwrap();
            let status = line["set"].as_object_mut().unwrap().remove("status");
            let set = self
                .create("apps.kruise.io", "v1beta1", "CloneSet", line["set"].take())
                .await;
            let (name, uid) = (set.metadata.name.unwrap(), set.metadata.uid.unwrap());
            let status = Patch::Merge(json!({ "status": status }));
            let sets = self.api("apps.kruise.io", "v1beta1", "CloneSet");
            sets.patch_status(&name, &PatchParams::default(), &status)
                .await
                .unwrap();
            let claims = line["claims"].take();
            let claims = claims.as_array().unwrap().iter().cloned();
            let dependents = [
                ("apps", "ControllerRevision", line["revision"].take()),
                ("", "Pod", line["pod"].take()),
            ];
            for (group, kind, mut object) in dependents
                .into_iter()
                .chain(claims.map(|claim| ("", "PersistentVolumeClaim", claim)))
            {
                object["metadata"]["ownerReferences"][0]["uid"] = json!(uid);
                self.create(group, "v1", kind, object).await;
            }
        }
    }

    async fn create(&self, group: &str, version: &str, kind: &str, object: Value) -> DynamicObject {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        self.api(group, version, kind)
            .create(&Default::default(), &object)
            .await
            .unwrap()
    }
}

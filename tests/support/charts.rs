//! CloneSets of templates as charts have them, the ways in which manifests are applied, and what none of these may
//! change.

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

/// A template, as the files of `tests/data/templates` have them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chart {
    name: String,
    template: Value,
    #[serde(default)]
    volume_claim_templates: Vec<Value>,
}

impl Chart {
    /// Those of a file.
    pub fn all_of(text: &str) -> Vec<Self> {
        let documents = serde_yaml::Deserializer::from_str(text);
        documents
            .map(|document| Self::deserialize(document).unwrap())
            .collect()
    }
}

/// A namespace with a CloneSet of one Pod for each template, written in one version.
pub struct Charts {
    admin: Cluster,
    pub namespace: &'static str,
    version: &'static str,
    charts: Vec<Chart>,
}

/// How the same manifests are written again.
#[derive(Clone, Copy, Debug)]
pub enum How {
    ClientSide,
    /// A merge patch made of the last manifest that was applied, the new one and what is there, as GitOps tools make it.
    ThreeWay,
    ServerSide,
    /// It takes what was applied last off the object.
    Replace,
}

impl How {
    pub const ALL: [Self; 4] = [Self::ClientSide, Self::ThreeWay, Self::ServerSide, Self::Replace];
}

/// Annotation with the manifest that was applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The merge patch that leads from one value to another.
fn merge_patch(from: &Value, to: &Value) -> Value {
    let (Some(from), Some(to)) = (from.as_object(), to.as_object()) else {
        return to.clone();
    };
    let gone = from.keys().filter(|key| !to.contains_key(*key));
    let gone = gone.map(|key| (key.clone(), Value::Null));
    let new = to.iter().filter_map(|(key, value)| match from.get(key) {
        Some(before) if before == value => None,
        before => Some((key.clone(), merge_patch(before.unwrap_or(&Value::Null), value))),
    });
    Value::Object(gone.chain(new).collect())
}

/// Of a merge patch, what it deletes, or else what it sets.
fn part(patch: &Value, deletes: bool) -> Option<Value> {
    match patch {
        Value::Null => deletes.then_some(Value::Null),
        Value::Object(all) => {
            let parts = all
                .iter()
                .filter_map(|(key, value)| Some((key.clone(), part(value, deletes)?)));
            Some(Value::Object(parts.collect()))
        }
        other => (!deletes).then(|| other.clone()),
    }
}

/// What kubectl sends of a manifest for a kind that it does not know: what it adds or changes of what is there, and
/// deletes of what was applied last.
fn three_way(original: &Value, modified: &Value, there: &Value) -> Value {
    let mut patch = part(&merge_patch(original, modified), true).unwrap_or_default();
    let set = part(&merge_patch(there, modified), false).unwrap_or_default();
    json_patch::merge(&mut patch, &set);
    patch
}

/// What stays as long as no Pod is replaced and no revision is added.
#[derive(Debug, PartialEq, Eq)]
pub struct Kept {
    /// UID of each Pod.
    pub pods: BTreeMap<String, String>,
    /// UID of each claim.
    pub claims: BTreeMap<String, String>,
    pub revisions: BTreeSet<String>,
    /// How often each container was restarted, by Pod and container; where a kubelet runs them.
    pub restarts: BTreeMap<(String, String), i64>,
}

/// How often the containers of Pods were restarted.
fn restarts(pods: &[DynamicObject]) -> BTreeMap<(String, String), i64> {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let both = pods
        .iter()
        .flat_map(|pod| lists.map(|list| (pod, &pod.data["status"][list])));
    let all = both.flat_map(|(pod, list)| {
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
    /// Those of `tests/data/templates`.
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
        let charts: Vec<Chart> = texts.flat_map(|text| Chart::all_of(&text)).collect();
        assert!(charts.len() > 40);
        Self::of(plane, admin, (namespace, version), charts)
    }

    /// Makes the namespace, with all that Pods of the templates ask for.
    pub fn of(
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
        plane.apply(&charts.needs()).unwrap();
        charts
    }

    fn needs(&self) -> String {
        let named = |api: &str, kind: &str, name: &str| json!({ "apiVersion": api, "kind": kind, "metadata": { "name": name } });
        // The namespace comes first.
        let mut needs = BTreeMap::from([(String::new(), named("v1", "Namespace", self.namespace))]);
        let mut account = |name: &str| {
            let mut account = named("v1", "ServiceAccount", name);
            account["metadata"]["namespace"] = json!(self.namespace);
            needs.insert(format!("{name} account"), account);
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
                needs.insert(format!("{name} priority"), class);
            }
            if let Some(name) = spec["runtimeClassName"].as_str() {
                let mut class = named("node.k8s.io/v1", "RuntimeClass", name);
                class["handler"] = json!("runc");
                needs.insert(format!("{name} runtime"), class);
            }
        }
        let documents: Vec<String> = needs.into_values().map(|object| object.to_string()).collect();
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

    /// Writes all manifests, with this image in place of that of each first container.
    pub async fn write(&self, plane: &ControlPlane, how: How, image: Option<&str>) {
        let items: Vec<Value> = self
            .charts
            .iter()
            .map(|chart| self.manifest(chart, image))
            .collect();
        let verb: &[&str] = match how {
            How::ClientSide => &["apply"],
            How::ServerSide => &["apply", "--server-side", "--force-conflicts"],
            How::Replace => &["replace"],
            How::ThreeWay => {
                let sets = self.api("apps.kruise.io", self.version, "CloneSet");
                for mut item in items {
                    let name = item["metadata"]["name"].as_str().unwrap().to_owned();
                    let there = json!(sets.get(&name).await.unwrap());
                    let last = &there["metadata"]["annotations"][LAST_APPLIED];
                    let last: Value = serde_json::from_str(last.as_str().unwrap()).unwrap();
                    item["metadata"]["annotations"][LAST_APPLIED] = json!(item.to_string() + "\n");
                    let patch = Patch::Merge(three_way(&last, &item, &there));
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

    /// Waits until each CloneSet's status speaks of its newest spec, and its Pod is of the newest revision.
    pub async fn settled(&self, what: &str) {
        let sets: Api<CloneSet> = Api::namespaced(self.admin.client.clone(), self.namespace);
        let what = format!("{}: {what}: all CloneSets are seen to", self.namespace);
        let settled = |set: &CloneSet| {
            let status = set.status.as_ref();
            status
                .is_some_and(|s| s.observed_generation == set.metadata.generation && s.updated_replicas == 1)
        };
        let ask = || async {
            let all = sets.list(&ListParams::default()).await.unwrap().items;
            (all.len() == self.charts.len() && all.iter().all(settled)).then_some(())
        };
        waits::until(&what, &String::new, ask).await;
    }

    /// Waits until each template is stored with defaults.
    pub async fn filled_in(&self) {
        let sets: Api<CloneSet> = Api::namespaced(self.admin.client.clone(), self.namespace);
        let what = format!("{}: all templates have defaults", self.namespace);
        let filled = |set: &CloneSet| {
            let spec = &set.spec.template["spec"];
            let mut containers = spec["containers"].as_array().into_iter().flatten();
            spec["dnsPolicy"].is_string() && containers.all(|one| one["imagePullPolicy"].is_string())
        };
        let ask = || async {
            let all = sets.list(&ListParams::default()).await.unwrap().items;
            all.iter().all(filled).then_some(())
        };
        waits::until(&what, &String::new, ask).await;
    }

    pub async fn kept(&self) -> Kept {
        let uids = |objects: Vec<DynamicObject>| -> BTreeMap<String, String> {
            let both = objects
                .into_iter()
                .map(|one| (one.metadata.name.unwrap(), one.metadata.uid.unwrap()));
            both.collect()
        };
        let pods = self.list("", "Pod").await;
        let marked: Vec<_> = pods
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
            marked.is_empty(),
            "{}: to be replaced: {marked:?}",
            self.namespace
        );
        Kept {
            restarts: restarts(&pods),
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

    /// Waits until each Pod is available, where a kubelet runs them.
    pub async fn available(&self, plane: &ControlPlane, what: &str) {
        let sets: Api<CloneSet> = Api::namespaced(self.admin.client.clone(), self.namespace);
        let what = format!("{}: {what}: all Pods are available", self.namespace);
        let available = |set: &CloneSet| {
            set.status
                .as_ref()
                .is_some_and(|status| status.available_replicas == 1)
        };
        let ask = || async {
            let all = sets.list(&ListParams::default()).await.unwrap().items;
            all.iter().all(available).then_some(())
        };
        // What is wrong with the others.
        let pods = || {
            let pods = ["describe", "pods", "--namespace", self.namespace];
            plane.kubectl(&pods).unwrap()
        };
        waits::until(&what, &pods, ask).await;
    }

    /// Writes all manifests in each way, and sees that nothing comes of it.
    pub async fn nothing_changes(&self, plane: &ControlPlane, image: Option<&str>, what: &str) {
        self.settled(what).await;
        let before = self.kept().await;
        for how in How::ALL {
            let what = format!("{what}, {how:?}");
            self.write(plane, how, image).await;
            self.settled(&what).await;
            assert_eq!(self.kept().await, before, "{}: {what}", self.namespace);
        }
    }

    /// Gives all first containers another image, and sees that their Pods stay and each set has one revision more.
    pub async fn image_changes_in_place(&self, plane: &ControlPlane, image: &str, what: &str) {
        let before = self.kept().await;
        self.write(plane, How::ClientSide, Some(image)).await;
        self.settled(what).await;
        let after = self.kept().await;
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
            let rest = [
                ("apps", "ControllerRevision", line["revision"].take()),
                ("", "Pod", line["pod"].take()),
            ];
            for (group, kind, mut object) in rest
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

//! An API server with policies, and Pods that are only created as a dry run.

use futures::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::string_map;
use kruise_api::keys;
use kruise_api::sidecarset::SidecarSetSpec;
use kruise_cluster::Cluster;
use kruise_workload::sidecarset::inject;
use kruise_workload::sidecarset::policy::{Options, compile};
use kruise_workload::sidecarset::set::SetView;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use support::untyped::untyped;
use support::waits::poll_until;
use testbed::cluster::ControlPlane;

use crate::last_webhook::{self, LastWebhook};

const GROUP: &str = "admissionregistration.k8s.io";
/// Requests at once.
const PARALLEL: usize = 8;

/// Namespaces of the tests, with their labels.
const NAMESPACES: [(&str, bool); 3] = [("default", false), ("ns1", true), ("ns2", true)];

pub struct PolicyCluster {
    _plane: ControlPlane,
    _webhook: LastWebhook,
    cluster: Cluster,
}

/// A SidecarSet as the cluster would have it.
pub struct Stored {
    pub name: String,
    annotations: BTreeMap<String, String>,
    latest_revision: String,
    pub spec: SidecarSetSpec,
}

impl Stored {
    /// Errors in its policy are errors of requests.
    pub fn from_json(set: &Value) -> Self {
        let mut annotations = string_map(&set["metadata"]["annotations"]);
        annotations.insert(keys::SIDECAR_SET_FAILURE_POLICY.to_owned(), "Fail".to_owned());
        Self {
            name: set["metadata"]["name"].as_str().unwrap().to_owned(),
            annotations,
            latest_revision: set["status"]["latestRevision"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            spec: SidecarSetSpec::deserialize(&set["spec"]).unwrap(),
        }
    }

    pub fn view(&self) -> SetView<'_> {
        SetView {
            name: &self.name,
            resource_version: "1",
            annotations: &self.annotations,
            latest_revision: &self.latest_revision,
            spec: &self.spec,
        }
    }
}

/// The policies of these sets.
pub fn compile_all(sets: &[Stored]) -> Vec<Value> {
    let views: Vec<SetView<'_>> = sets.iter().map(Stored::view).collect();
    let options = Options {
        namespace: "kruise-system",
        sort_containers: false,
        sets: &views,
        revisions: &[],
    };
    views
        .iter()
        .flat_map(|set| compile(set, &options).unwrap())
        .collect()
}

/// A Pod of namespace `default` as the function makes it of one that the API server has read.
pub fn inject_all(sets: &[Stored], pod: &Value) -> Value {
    let views: Vec<SetView<'_>> = sets.iter().map(Stored::view).collect();
    let labels = BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), "default".to_owned())]);
    let cluster = inject::Cluster {
        sets: &views,
        namespace_labels: Some(&labels),
        revisions: &[],
    };
    let options = inject::Options {
        sort_containers: false,
        now: Timestamp::UNIX_EPOCH,
    };
    let mut pod = pod.clone();
    inject::inject(&mut pod, "default", &cluster, &options, &mut || 0).unwrap();
    pod
}

pub fn revisions(list: &Value) -> Vec<ControllerRevision> {
    Option::deserialize(list).unwrap().unwrap_or_default()
}

impl PolicyCluster {
    pub async fn start() -> Self {
        let plane = ControlPlane::start().unwrap();
        let objects = NAMESPACES.iter().map(|(name, is_production)| {
            let labels = if *is_production { json!({ "env": "prod" }) } else { json!({}) };
            let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } });
            let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default", "namespace": name } });
            format!("{namespace}\n---\n{account}")
        });
        let objects: Vec<String> = objects.collect();
        plane.apply(&objects.join("\n---\n")).unwrap();
        let cluster = crate::connect::connect(plane.kubeconfig()).await;
        let webhook = LastWebhook::serve().await;
        plane.apply(&webhook.configuration.to_string()).unwrap();
        Self {
            _plane: plane,
            _webhook: webhook,
            cluster,
        }
    }

    /// Creates policies and bindings, and waits until they act.
    pub async fn install(&self, objects: Vec<Value>) {
        let create = |object: Value| async move {
            let kind = object["kind"].as_str().unwrap().to_owned();
            let api = untyped(&self.cluster, GROUP, "v1", &kind, None);
            let typed: DynamicObject = serde_json::from_value(object.clone()).unwrap();
            let created = api.create(&PostParams::default(), &typed).await;
            created.map_err(|why| format!("{why}\n{}", serde_json::to_string_pretty(&object).unwrap()))
        };
        let created: Result<Vec<_>, String> = stream::iter(objects)
            .map(create)
            .buffer_unordered(PARALLEL)
            .try_collect()
            .await;
        if let Err(why) = created {
            panic!("{why}");
        }
        // The API server takes all that it has seen at once: those before are there with the last one.
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let name = format!("last-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let metadata = json!({ "name": name });
        let rule = json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] });
        let label = "[JSONPatch{op: 'add', path: '/metadata/labels/seen', value: 'yes'}]";
        for object in [
            json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "MutatingAdmissionPolicy", "metadata": metadata, "spec": {
                "failurePolicy": "Ignore", "reinvocationPolicy": "Never",
                "matchConstraints": { "resourceRules": [rule], "objectSelector": { "matchLabels": { "last": name } } },
                "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression": label } }],
            } }),
            json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "MutatingAdmissionPolicyBinding", "metadata": metadata,
                "spec": { "policyName": name } }),
        ] {
            create(object).await.unwrap();
        }
        let pod = json!({ "metadata": { "name": "p", "labels": { "last": name } }, "spec": { "containers": [{ "name": "a", "image": "i" }] } });
        poll_until("last policy", &String::new, || async {
            let pod = self.create_pod(&pod).await.unwrap();
            (pod["metadata"]["labels"]["seen"] == "yes").then_some(())
        })
        .await;
    }

    /// Updates a policy: the API server then chooses another order.
    pub async fn touch(&self, name: &str, time: usize) {
        let policies = untyped(&self.cluster, GROUP, "v1", "MutatingAdmissionPolicy", None);
        let patch = json!({ "metadata": { "annotations": { "time": time.to_string() } } });
        policies
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }

    /// The Pod as policies make it, valid or not; the error of a request that fails before validation.
    pub async fn mutate(&self, pod: &Value) -> Result<Value, String> {
        let mut pod = pod.clone();
        kruise_api::json::set(
            &mut pod,
            &["metadata", "labels", last_webhook::LABEL],
            json!("yes"),
        );
        let refused = self.create_pod(&pod).await.map(|_| "created");
        let why = refused.expect_err("a webhook that refuses");
        last_webhook::pod_in(&why).ok_or(why)
    }

    /// The Pod that would be created, or why it is refused.
    pub async fn create_pod(&self, pod: &Value) -> Result<Value, String> {
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or("default");
        let api: Api<DynamicObject> = untyped(&self.cluster, "", "v1", "Pod", Some(namespace));
        let mut pod = pod.clone();
        kruise_api::json::set(&mut pod, &["apiVersion"], json!("v1"));
        kruise_api::json::set(&mut pod, &["kind"], json!("Pod"));
        kruise_api::json::set(&mut pod, &["spec", "automountServiceAccountToken"], json!(false));
        let typed: DynamicObject = serde_json::from_value(pod).unwrap();
        let params = PostParams {
            dry_run: true,
            field_manager: None,
        };
        match api.create(&params, &typed).await {
            Ok(created) => Ok(serde_json::to_value(created).unwrap()),
            Err(kube::Error::Api(status)) => Err(format!("{} {}", status.code, status.message)),
            Err(other) => panic!("{other}"),
        }
    }
}

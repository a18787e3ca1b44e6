//! An API server, with policies or without, and Pods that are only created as a dry run.

use futures::{StreamExt, TryStreamExt, stream};
use kruise_cluster::Cluster;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use support::untyped::untyped;
use support::waits::poll_until;
use testbed::cluster::ControlPlane;

use crate::last_webhook::{self, LastWebhook};

const GROUP: &str = "admissionregistration.k8s.io";
/// Requests at once.
const PARALLEL: usize = 8;

/// Namespaces of the tests, with their labels.
const NAMESPACES: [(&str, bool); 3] = [("default", false), ("ns1", true), ("ns2", true)];

pub struct InjectionCluster {
    pub plane: ControlPlane,
    _webhook: LastWebhook,
    pub cluster: Cluster,
}

impl InjectionCluster {
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
        let started = Self {
            plane,
            _webhook: webhook,
            cluster,
        };
        let labels = json!({ last_webhook::LABEL: "yes" });
        let pod = json!({ "metadata": { "name": "p", "labels": labels }, "spec": { "containers": [{ "name": "a", "image": "i" }] } });
        let refused = async || {
            let why = started.create_pod(&pod).await.err()?;
            last_webhook::pod_in(&why)
        };
        poll_until("a Pod that the last webhook refuses", &String::new, refused).await;
        started
    }

    /// The same; `None` if this release does not serve policies, and there is nothing to test.
    pub async fn start_with_policies() -> Option<Self> {
        let started = Self::start().await;
        started
            .plane
            .serves_mutating_policies()
            .unwrap()
            .then_some(started)
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

    /// The Pod as policies and webhooks make it, valid or not; the error of a request that fails before validation.
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

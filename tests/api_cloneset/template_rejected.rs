//! A rejected template stops the update and nothing else: the existing Pods are still reconciled.

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kruise_api::cloneset::CloneSet;
use kube::api::{Api, DeleteParams};
use serde_json::{Value, json};

use crate::errors::{condition_message, set_quota, wait_for_condition};
use crate::fixture::Fixture;
use crate::pods::{self, condition_is_true, spec_image, uid};
use crate::test_cluster::{TestCluster, WAIT_TIMEOUT, create, shared_cluster, wait_until};
use support::untyped::untyped;
use testbed::cluster::wait;

const GATE: &str = "InPlaceUpdateReady";

/// Waits until `count` Pods are ready, whatever template the status is about.
async fn wait_for_ready(fixture: &Fixture, set: &str, count: i32) -> CloneSet {
    wait_until(
        &fixture.sets(),
        set,
        "so many Pods ready",
        move |set: &CloneSet| {
            let status = set.status.as_ref();
            status.is_some_and(|s| [s.replicas, s.ready_replicas, s.available_replicas] == [count; 3])
        },
    )
    .await
}

/// Whether the status is about an older template than the CloneSet's.
fn is_behind(set: &CloneSet) -> bool {
    set.status.as_ref().unwrap().observed_generation < set.metadata.generation
}

/// Changes the image while no kubelet runs the Pods: all of them are in mid-update, out of their Services.
async fn start_update_without_kubelet(fixture: &Fixture, image: &str) -> Vec<Value> {
    fixture.stop_kubelet();
    fixture.set_image("web", image).await;
    let update_started = |pod: &&Value| spec_image(pod, 0) == image && !condition_is_true(pod, GATE);
    let updating = fixture
        .wait_pods("web", "all in mid-update", |pods| pods.iter().all(update_started))
        .await;
    wait_until(&fixture.sets(), "web", "none ready", |set: &CloneSet| {
        set.status.as_ref().is_some_and(|s| s.ready_replicas == 0)
    })
    .await;
    updating
}

/// Sets the template's one container `app`.
async fn set_container(fixture: &Fixture, app: Value) {
    let template = json!({ "spec": { "containers": [app] } });
    fixture
        .patch_set("web", json!({ "spec": { "template": template } }))
        .await;
}

/// Asserts that every Pod's spec has that image.
fn assert_all_run(pods: &[Value], image: &str) {
    let images: Vec<String> = pods.iter().map(|pod| spec_image(pod, 0)).collect();
    assert!(images.iter().all(|one| one == image), "{images:?}");
}

/// Deletes a Pod, and waits for its replacement.
async fn replace_pod(fixture: &Fixture, pod: &Value) -> Vec<Value> {
    let params = DeleteParams::default();
    fixture.pods().delete(&pods::name(pod), &params).await.unwrap();
    let replaced = |pods: &[&Value]| {
        let good = |one: &&Value| uid(one) != uid(pod) && condition_is_true(one, "Ready");
        pods.len() == 3 && pods.iter().all(good)
    };
    fixture.wait_pods("web", "another in its place", replaced).await
}

/// During a rollout, a user applies a template that the API server's own dry run rejects, and no webhook stops it.
pub async fn rejected_template_finishes_running_update(cluster: &'static TestCluster) {
    let mut fixture = Fixture::new(cluster, "mid-update").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let before = start_update_without_kubelet(&fixture, "example.com/app:2").await;
    let invalid =
        json!({ "name": "app", "image": "example.com/app:3", "ports": [{ "containerPort": 99_999 }] });
    set_container(&fixture, invalid).await;
    wait_for_condition(&fixture, "FailedUpdate", "containerPort: Invalid value: 99999").await;

    fixture.restart_kubelet();
    let set = wait_for_ready(&fixture, "web", 3).await;
    assert!(is_behind(&set), "{:?}", set.status);
    let gates_true = |pods: &[&Value]| pods.iter().all(|pod| condition_is_true(pod, GATE));
    let after = fixture.wait_pods("web", "their gates open", gates_true).await;
    assert_eq!(
        pods::uids_by_name(&before),
        pods::uids_by_name(&after),
        "they stay"
    );
    assert_all_run(&after, "example.com/app:2");
    assert_all_run(&replace_pod(&fixture, &after[0]).await, "example.com/app:2");
    let set = wait_for_condition(&fixture, "Waiting", "CloneSet cannot be updated: ").await;
    let message = condition_message(&set, "Waiting");
    assert!(message.contains("99999"), "{message}");

    set_container(&fixture, json!({ "name": "app", "image": "example.com/app:3" })).await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "FailedUpdate"), "");
    assert_all_run(&fixture.pods_of("web").await, "example.com/app:3");
}

#[tokio::test]
async fn revision_quota_exceeded_keeps_pods() {
    let fixture = Fixture::new(shared_cluster(), "one-revision").await;
    set_quota(&fixture, "count/controllerrevisions.apps", 1).await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    fixture
        .set_image_and_spec("web", "example.com/app:2", json!({ "replicas": 5 }))
        .await;
    wait_for_condition(&fixture, "FailedUpdate", "exceeded quota: few").await;
    let set = wait_for_ready(&fixture, "web", 5).await;
    assert!(is_behind(&set), "{:?}", set.status);
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 2 } }))
        .await;
    wait_for_ready(&fixture, "web", 2).await;
    assert_all_run(&fixture.pods_of("web").await, "example.com/app:1");

    set_quota(&fixture, "count/controllerrevisions.apps", 9).await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "FailedUpdate"), "");
    assert_all_run(&fixture.pods_of("web").await, "example.com/app:2");
}

/// The API server stores no PodTemplate, so a quota of PodTemplates does not block Pods.
#[tokio::test]
async fn denied_dry_run_does_not_block_pods_or_in_place_update() {
    let fixture = Fixture::new(shared_cluster(), "no-templates").await;
    set_quota(&fixture, "count/podtemplates", 0).await;
    let container =
        json!({ "name": "app", "image": "example.com/app:1", "resources": { "requests": { "cpu": 1 } } });
    let set = fixture
        .create_cloneset(
            "web",
            json!({ "template": { "spec": { "containers": [container] } } }),
        )
        .await;
    assert!(
        set.spec.template["spec"]["dnsPolicy"].is_null(),
        "defaults were set"
    );
    fixture.wait_settled("web").await;
    let first = pods::uids_by_name(&fixture.pods_of("web").await);
    let update_to = async |image: &str| {
        fixture.set_image("web", image).await;
        let set = fixture.wait_settled("web").await;
        assert_eq!(condition_message(&set, "FailedUpdate"), "");
        let pods = fixture.pods_of("web").await;
        assert_all_run(&pods, image);
        assert_eq!(pods::uids_by_name(&pods), first);
        set.status.unwrap().update_revision
    };
    let second = update_to("example.com/app:2").await;

    set_quota(&fixture, "count/podtemplates", 9).await;
    let third = update_to("example.com/app:3").await;
    assert_ne!(third, second);
    let template = fixture.sets().get("web").await.unwrap().spec.template;
    assert_eq!(template["spec"]["dnsPolicy"], "ClusterFirst");
    assert_eq!(update_to("example.com/app:2").await, second);
    let revisions = fixture.api("apps", "v1", "ControllerRevision");
    let revisions = revisions.list(&Default::default()).await.unwrap();
    assert_eq!(revisions.items.len(), 3);
}

/// A foreign webhook for some objects of this namespace that never answers.
struct UnreachableWebhook<'a> {
    fixture: &'a Fixture,
    hooks: Api<ValidatingWebhookConfiguration>,
    /// What it is called for: kubectl arguments for one such object.
    probe: Vec<String>,
}

/// It is called for templates of Pods.
const TEMPLATES: (&str, &str) = ("podtemplates", "CREATE");
/// It is called for updates of Pods.
const PODS: (&str, &str) = ("pods", "UPDATE");

impl<'a> UnreachableWebhook<'a> {
    async fn start(fixture: &'a Fixture, (resource, operation): (&str, &str), probe: &[&str]) -> Self {
        let rule = json!({ "apiGroups": [""], "apiVersions": ["v1"], "resources": [resource],
            "operations": [operation] });
        let hook = json!({
            "name": "silence.example.com", "failurePolicy": "Fail", "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "rules": [rule],
            // Nothing listens there.
            "clientConfig": { "url": "https://127.0.0.1:1/" },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": fixture.namespace } },
        });
        let hooks = Api::all(fixture.admin.client.clone());
        let object = json!({ "metadata": { "name": fixture.namespace }, "webhooks": [hook] });
        create(&hooks, object).await;
        let namespace = format!("--namespace={}", fixture.namespace);
        let failure = probe.iter().copied().chain(["--dry-run=server", &namespace]);
        let probe = failure.map(str::to_owned).collect();
        let webhook = Self {
            fixture,
            hooks,
            probe,
        };
        webhook.wait_until_called(true);
        webhook
    }

    async fn remove(self) {
        let params = DeleteParams::default();
        self.hooks.delete(&self.fixture.namespace, &params).await.unwrap();
        self.wait_until_called(false);
    }

    /// Waits until the API server calls it, or no longer does.
    fn wait_until_called(&self, expected: bool) {
        let probe: Vec<&str> = self.probe.iter().map(String::as_str).collect();
        let plane = &self.fixture.cluster.plane;
        let is_called = || plane.kubectl(&probe).is_err();
        let what = "the webhook is asked, or no more";
        wait::until(what, WAIT_TIMEOUT, || Ok((is_called() == expected).then_some(()))).unwrap();
    }
}

#[tokio::test]
async fn unreachable_foreign_webhook_is_reported_and_recovers() {
    let fixture = Fixture::new(shared_cluster(), "silence").await;
    let failure = "failed calling webhook \"silence.example.com\"";
    let container = json!({ "name": "c", "image": "i:1" });
    let template = json!({ "apiVersion": "v1", "kind": "PodTemplate", "metadata": { "name": "probe" },
        "template": { "spec": { "containers": [container] } } });
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), template.to_string()).unwrap();
    let probe = ["create", "-f", file.path().to_str().unwrap()];
    let webhook = UnreachableWebhook::start(&fixture, TEMPLATES, &probe).await;
    fixture.create_cloneset("web", json!({})).await;
    wait_for_condition(&fixture, "FailedUpdate", failure).await;
    wait_for_condition(&fixture, "Waiting", failure).await;
    fixture.wait_event("FailedUpdate", "web").await;
    assert!(
        fixture.pods_of("web").await.is_empty(),
        "created from an unchecked template"
    );
    webhook.remove().await;
    fixture.wait_settled("web").await;
    let defaults_stored = async || {
        let template = fixture.sets().get("web").await.unwrap().spec.template;
        template["spec"]["dnsPolicy"].is_string().then_some(())
    };
    fixture
        .poll_until("what the template leaves out is stored", defaults_stored)
        .await;

    let webhook = UnreachableWebhook::start(&fixture, TEMPLATES, &probe).await;
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_settled("web").await;
    assert_all_run(&fixture.pods_of("web").await, "example.com/app:2");
    let annotation = json!({ "template": { "metadata": { "annotations": { "example.com/note": "1" } } } });
    fixture
        .set_image_and_spec("web", "example.com/app:3", annotation)
        .await;
    let set = wait_for_condition(&fixture, "FailedUpdate", failure).await;
    assert!(is_behind(&set), "{:?}", set.status);
    let pods = fixture.pods_of("web").await;
    assert_all_run(&replace_pod(&fixture, &pods[0]).await, "example.com/app:2");
    webhook.remove().await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "FailedUpdate"), "");
    assert_all_run(&fixture.pods_of("web").await, "example.com/app:3");
}

/// The Pod is changed after it was taken out of its Services; a failure must not leave it there.
#[tokio::test]
async fn unreachable_pod_webhook_keeps_pods_serving() {
    let fixture = Fixture::new(shared_cluster(), "silent-pods").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    let probe = ["annotate", "pod", &pods::name(&before[0]), "example.com/probe=x"];
    let webhook = UnreachableWebhook::start(&fixture, PODS, &probe).await;
    let status_writes = || {
        let writes = fixture.accepted_writes().into_iter();
        writes.filter(|(_, what, _)| what == "pods/status").count()
    };
    let writes_before = status_writes();
    fixture.set_image("web", "example.com/app:2").await;
    wait_for_condition(&fixture, "FailedUpdate", "failed calling webhook").await;
    let all_serve = |pods: &[&Value]| {
        let preparing = |pod: &Value| {
            pod["status"]["conditions"]
                .to_string()
                .contains("StartInPlaceUpdate")
        };
        pods.len() == 3
            && pods
                .iter()
                .all(|pod| condition_is_true(pod, "Ready") && !preparing(pod))
    };
    fixture.wait_pods("web", "all serve", all_serve).await;
    // A retry is a dry run, which takes no Pod out of its Services.
    let failed_dry_runs = || {
        let all = fixture.dry_runs().into_iter();
        all.filter(|((_, what, _), code)| what == "pods" && *code >= 300)
            .count()
    };
    let failed_before = failed_dry_runs();
    let enough = || async { (failed_dry_runs() > failed_before + 3).then_some(()) };
    fixture.poll_until("more tries", enough).await;
    assert!(
        status_writes() <= writes_before + 2 * before.len(),
        "{:?}",
        fixture.accepted_writes()
    );
    webhook.remove().await;
    fixture.wait_settled("web").await;
    assert_all_run(&fixture.pods_of("web").await, "example.com/app:2");
}

/// Nothing can be created in this namespace any more.
#[tokio::test]
async fn terminating_namespace_is_not_retried() {
    let fixture = Fixture::new(shared_cluster(), "terminating").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let names: Vec<String> = fixture.pods_of("web").await.iter().map(pods::name).collect();
    let namespaces = untyped(&fixture.admin, "", "v1", "Namespace", None);
    let params = DeleteParams::default();
    namespaces.delete(&fixture.namespace, &params).await.unwrap();
    let rejected = || {
        let requests = fixture.write_requests().into_iter();
        let rejected =
            requests.filter(|((verb, what, _), code)| verb == "create" && what == "pods" && *code == 403);
        rejected.count()
    };
    for name in names {
        fixture.pods().delete(&name, &params).await.unwrap();
        let attempted = || async { (rejected() > 0).then_some(()) };
        fixture.poll_until("a Pod is tried", attempted).await;
    }
    wait_until(&fixture.sets(), "web", "no Pods", |set: &CloneSet| {
        set.status.as_ref().is_some_and(|s| s.replicas == 0)
    })
    .await;
    assert_eq!(rejected(), 1, "{:?}", fixture.write_requests());
}

/// kubectl rejects such a Deployment with `--validate=strict`, its default. A manifest that was applied before can be
/// applied again.
#[tokio::test]
async fn strict_validation_rejects_misspelled_fields() {
    let fixture = Fixture::new(shared_cluster(), "misspelled").await;
    let plane = &fixture.cluster.plane;
    let file = plane.dir().join("misspelled.json");
    let file = file.display().to_string();
    let apply = |image: &str, typo: &str, validate: &str| {
        let container = json!({ "name": "app", "image": image, typo: { "exec": { "command": ["true"] } } });
        let template =
            json!({ "metadata": { "labels": { "app": "web" } }, "spec": { "containers": [container] } });
        let manifest = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "metadata": { "name": "web" },
            "spec": { "replicas": 1, "selector": { "matchLabels": { "app": "web" } }, "template": template },
        });
        std::fs::write(&file, manifest.to_string()).unwrap();
        let validate = format!("--validate={validate}");
        plane.kubectl(&["apply", "--namespace", &fixture.namespace, &validate, "-f", &file])
    };
    let path = |typo: &str| {
        format!("strict decoding error: unknown field \"spec.template.spec.containers[0].{typo}\"")
    };
    let error_of = |applied: anyhow::Result<String>| format!("{:#}", applied.unwrap_err());

    let error = error_of(apply("example.com/app:1", "readynessProbe", "strict"));
    assert!(error.contains(&path("readynessProbe")), "{error}");
    apply("example.com/app:1", "readynessProbe", "warn").unwrap();
    apply("example.com/app:2", "readynessProbe", "strict").expect("it was applied before");
    let error = error_of(apply("example.com/app:3", "livenesProbe", "strict"));
    assert!(error.contains(&path("livenesProbe")), "{error}");
    apply("example.com/app:3", "livenessProbe", "strict").unwrap();
    fixture.wait_settled("web").await;
}

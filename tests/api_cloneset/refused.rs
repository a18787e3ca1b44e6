//! A template that is refused stops the update, and nothing else: the Pods that are there are looked after.

use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kruise_api::cloneset::CloneSet;
use kube::api::{Api, DeleteParams};
use serde_json::{Value, json};

use crate::errors::{quota, said, says};
use crate::field::Field;
use crate::pods::{self, is, uid, wanted_image};
use crate::world::{PATIENCE, World, create, until, world};
use support::untyped::untyped;
use testbed::cluster::wait;

const GATE: &str = "InPlaceUpdateReady";

/// Waits until so many Pods are ready, whatever template the status is about.
async fn ready(field: &Field, set: &str, count: i32) -> CloneSet {
    until(&field.sets(), set, "so many Pods ready", move |set: &CloneSet| {
        let status = set.status.as_ref();
        status.is_some_and(|s| [s.replicas, s.ready_replicas, s.available_replicas] == [count; 3])
    })
    .await
}

/// Whether the status is about a template that is older than the CloneSet's.
fn behind(set: &CloneSet) -> bool {
    set.status.as_ref().unwrap().observed_generation < set.metadata.generation
}

/// Asks for an image while nobody runs the Pods: all of them are in mid-update, out of their Services.
async fn all_in_mid_update(field: &Field, image: &str) -> Vec<Value> {
    field.kubelet_goes();
    field.image("web", image).await;
    let begun = |pod: &&Value| wanted_image(pod, 0) == image && !is(pod, GATE);
    let there = field
        .until_pods("web", "all in mid-update", |pods| pods.iter().all(begun))
        .await;
    until(&field.sets(), "web", "none ready", |set: &CloneSet| {
        set.status.as_ref().is_some_and(|s| s.ready_replicas == 0)
    })
    .await;
    there
}

/// Gives the template one container `app`.
async fn containers(field: &Field, app: Value) {
    let template = json!({ "spec": { "containers": [app] } });
    field
        .edit("web", json!({ "spec": { "template": template } }))
        .await;
}

/// All Pods are to run that image.
fn run(pods: &[Value], image: &str) {
    let images: Vec<String> = pods.iter().map(|pod| wanted_image(pod, 0)).collect();
    assert!(images.iter().all(|one| one == image), "{images:?}");
}

/// Deletes a Pod, and waits for another in its place.
async fn another_for(field: &Field, pod: &Value) -> Vec<Value> {
    let params = DeleteParams::default();
    field.pods().delete(&pods::name(pod), &params).await.unwrap();
    let there = |pods: &[&Value]| {
        let good = |one: &&Value| uid(one) != uid(pod) && is(one, "Ready");
        pods.len() == 3 && pods.iter().all(good)
    };
    field.until_pods("web", "another in its place", there).await
}

/// A rollout has begun, and somebody applies a template that the API server's own dry run refuses, where no webhook
/// stops them.
pub async fn pods_in_mid_update_are_finished(world: &'static World) {
    let mut field = Field::new(world, "mid-update").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let before = all_in_mid_update(&field, "example.com/app:2").await;
    let mistake =
        json!({ "name": "app", "image": "example.com/app:3", "ports": [{ "containerPort": 99_999 }] });
    containers(&field, mistake).await;
    says(&field, "FailedUpdate", "containerPort: Invalid value: 99999").await;

    field.kubelet_comes_back();
    let set = ready(&field, "web", 3).await;
    assert!(behind(&set), "{:?}", set.status);
    let open = |pods: &[&Value]| pods.iter().all(|pod| is(pod, GATE));
    let after = field.until_pods("web", "their gates open", open).await;
    assert_eq!(pods::identities(&before), pods::identities(&after), "they stay");
    run(&after, "example.com/app:2");
    run(&another_for(&field, &after[0]).await, "example.com/app:2");
    let set = says(&field, "Waiting", "CloneSet cannot be updated: ").await;
    let told = said(&set, "Waiting");
    assert!(told.contains("99999"), "{told}");

    containers(&field, json!({ "name": "app", "image": "example.com/app:3" })).await;
    let set = field.settled("web").await;
    assert_eq!(said(&set, "FailedUpdate"), "");
    run(&field.pods_of("web").await, "example.com/app:3");
}

#[tokio::test]
async fn pods_are_kept_while_a_quota_has_no_room_for_another_revision() {
    let field = Field::new(world(), "one-revision").await;
    quota(&field, "count/controllerrevisions.apps", 1).await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    field
        .image_and("web", "example.com/app:2", json!({ "replicas": 5 }))
        .await;
    says(&field, "FailedUpdate", "exceeded quota: few").await;
    let set = ready(&field, "web", 5).await;
    assert!(behind(&set), "{:?}", set.status);
    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    ready(&field, "web", 2).await;
    run(&field.pods_of("web").await, "example.com/app:1");

    quota(&field, "count/controllerrevisions.apps", 9).await;
    let set = field.settled("web").await;
    assert_eq!(said(&set, "FailedUpdate"), "");
    run(&field.pods_of("web").await, "example.com/app:2");
}

/// The API server makes no PodTemplate, so a quota of them is no reason to make no Pods.
#[tokio::test]
async fn pods_are_made_and_updated_in_place_while_the_dry_run_is_refused_and_after_it() {
    let field = Field::new(world(), "no-templates").await;
    quota(&field, "count/podtemplates", 0).await;
    let container =
        json!({ "name": "app", "image": "example.com/app:1", "resources": { "requests": { "cpu": 1 } } });
    let set = field
        .set(
            "web",
            json!({ "template": { "spec": { "containers": [container] } } }),
        )
        .await;
    assert!(
        set.spec.template["spec"]["dnsPolicy"].is_null(),
        "somebody filled in defaults"
    );
    field.settled("web").await;
    let first = pods::identities(&field.pods_of("web").await);
    let update_to = async |image: &str| {
        field.image("web", image).await;
        let set = field.settled("web").await;
        assert_eq!(said(&set, "FailedUpdate"), "");
        let pods = field.pods_of("web").await;
        run(&pods, image);
        assert_eq!(pods::identities(&pods), first);
        set.status.unwrap().update_revision
    };
    let second = update_to("example.com/app:2").await;

    quota(&field, "count/podtemplates", 9).await;
    let third = update_to("example.com/app:3").await;
    assert_ne!(third, second);
    let filled = field.sets().get("web").await.unwrap().spec.template;
    assert_eq!(filled["spec"]["dnsPolicy"], "ClusterFirst");
    assert_eq!(update_to("example.com/app:2").await, second);
    let revisions = field.api("apps", "v1", "ControllerRevision");
    let revisions = revisions.list(&Default::default()).await.unwrap();
    assert_eq!(revisions.items.len(), 3);
}

/// Somebody's webhook that is asked about some objects of this namespace, and never answers.
struct Silence<'a> {
    field: &'a Field,
    hooks: Api<ValidatingWebhookConfiguration>,
    /// What it is asked about: arguments of kubectl for one.
    probe: Vec<String>,
}

/// It is asked about templates of Pods.
const TEMPLATES: (&str, &str) = ("podtemplates", "CREATE");
/// It is asked about changes of Pods.
const PODS: (&str, &str) = ("pods", "UPDATE");

impl<'a> Silence<'a> {
    async fn begins(field: &'a Field, (resource, operation): (&str, &str), probe: &[&str]) -> Self {
        let rule = json!({ "apiGroups": [""], "apiVersions": ["v1"], "resources": [resource],
            "operations": [operation] });
        let hook = json!({
            "name": "silence.example.com", "failurePolicy": "Fail", "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "rules": [rule],
            // Nobody listens there.
            "clientConfig": { "url": "https://127.0.0.1:1/" },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": field.namespace } },
        });
        let hooks = Api::all(field.admin.client.clone());
        let object = json!({ "metadata": { "name": field.namespace }, "webhooks": [hook] });
        create(&hooks, object).await;
        let namespace = format!("--namespace={}", field.namespace);
        let words = probe.iter().copied().chain(["--dry-run=server", &namespace]);
        let probe = words.map(str::to_owned).collect();
        let silence = Self { field, hooks, probe };
        silence.until(true);
        silence
    }

    async fn ends(self) {
        let params = DeleteParams::default();
        self.hooks.delete(&self.field.namespace, &params).await.unwrap();
        self.until(false);
    }

    /// Waits until the API server goes by it, or no more.
    fn until(&self, wanted: bool) {
        let probe: Vec<&str> = self.probe.iter().map(String::as_str).collect();
        let plane = &self.field.world.plane;
        let failed = || plane.kubectl(&probe).is_err();
        let what = "the webhook is asked, or no more";
        wait::until(what, PATIENCE, || Ok((failed() == wanted).then_some(()))).unwrap();
    }
}

#[tokio::test]
async fn an_outage_of_somebody_s_webhook_is_told_and_passes() {
    let field = Field::new(world(), "silence").await;
    let words = "failed calling webhook \"silence.example.com\"";
    let container = json!({ "name": "c", "image": "i:1" });
    let template = json!({ "apiVersion": "v1", "kind": "PodTemplate", "metadata": { "name": "probe" },
        "template": { "spec": { "containers": [container] } } });
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), template.to_string()).unwrap();
    let probe = ["create", "-f", file.path().to_str().unwrap()];
    let silence = Silence::begins(&field, TEMPLATES, &probe).await;
    field.set("web", json!({})).await;
    says(&field, "FailedUpdate", words).await;
    says(&field, "Waiting", words).await;
    field.event("FailedUpdate", "web").await;
    assert!(
        field.pods_of("web").await.is_empty(),
        "of a template that nobody knows"
    );
    silence.ends().await;
    field.settled("web").await;
    let filled = async || {
        let template = field.sets().get("web").await.unwrap().spec.template;
        template["spec"]["dnsPolicy"].is_string().then_some(())
    };
    field
        .until("what the template leaves out is stored", filled)
        .await;

    let silence = Silence::begins(&field, TEMPLATES, &probe).await;
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    run(&field.pods_of("web").await, "example.com/app:2");
    let note = json!({ "template": { "metadata": { "annotations": { "example.com/note": "1" } } } });
    field.image_and("web", "example.com/app:3", note).await;
    let set = says(&field, "FailedUpdate", words).await;
    assert!(behind(&set), "{:?}", set.status);
    let pods = field.pods_of("web").await;
    run(&another_for(&field, &pods[0]).await, "example.com/app:2");
    silence.ends().await;
    let set = field.settled("web").await;
    assert_eq!(said(&set, "FailedUpdate"), "");
    run(&field.pods_of("web").await, "example.com/app:3");
}

/// The change of a Pod comes after what takes it out of its Services, and must not leave it there.
#[tokio::test]
async fn pods_serve_while_somebody_s_webhook_for_them_is_away() {
    let field = Field::new(world(), "silent-pods").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let before = field.pods_of("web").await;
    let probe = ["annotate", "pod", &pods::name(&before[0]), "example.com/probe=x"];
    let silence = Silence::begins(&field, PODS, &probe).await;
    let statuses = || {
        let writes = field.writes().into_iter();
        writes.filter(|(_, what, _)| what == "pods/status").count()
    };
    let from = statuses();
    field.image("web", "example.com/app:2").await;
    says(&field, "FailedUpdate", "failed calling webhook").await;
    let serve = |pods: &[&Value]| {
        let left = |pod: &Value| {
            pod["status"]["conditions"]
                .to_string()
                .contains("StartInPlaceUpdate")
        };
        pods.len() == 3 && pods.iter().all(|pod| is(pod, "Ready") && !left(pod))
    };
    field.until_pods("web", "all serve", serve).await;
    // Another try is a dry run, for which none leaves its Services.
    let tries = || {
        let all = field.dry_runs().into_iter();
        all.filter(|((_, what, _), code)| what == "pods" && *code >= 300)
            .count()
    };
    let before_them = tries();
    let more = || async { (tries() > before_them + 3).then_some(()) };
    field.until("more tries", more).await;
    assert!(statuses() <= from + 2 * before.len(), "{:?}", field.writes());
    silence.ends().await;
    field.settled("web").await;
    run(&field.pods_of("web").await, "example.com/app:2");
}

/// There is nothing to be made in it any more.
#[tokio::test]
async fn in_a_terminating_namespace_nothing_is_tried_again() {
    let field = Field::new(world(), "terminating").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let names: Vec<String> = field.pods_of("web").await.iter().map(pods::name).collect();
    let namespaces = untyped(&field.admin, "", "v1", "Namespace", None);
    let params = DeleteParams::default();
    namespaces.delete(&field.namespace, &params).await.unwrap();
    let refused = || {
        let asked = field.asked().into_iter();
        let refused =
            asked.filter(|((verb, what, _), code)| verb == "create" && what == "pods" && *code == 403);
        refused.count()
    };
    for name in names {
        field.pods().delete(&name, &params).await.unwrap();
        let tried = || async { (refused() > 0).then_some(()) };
        field.until("a Pod is tried", tried).await;
    }
    until(&field.sets(), "web", "no Pods", |set: &CloneSet| {
        set.status.as_ref().is_some_and(|s| s.replicas == 0)
    })
    .await;
    assert_eq!(refused(), 1, "{:?}", field.asked());
}

/// As kubectl refuses such a Deployment: where `--validate` is `strict`, as it is unless told otherwise. A manifest that
/// was applied before can be applied again.
#[tokio::test]
async fn misspelled_fields_are_refused_where_the_user_asks_for_it() {
    let field = Field::new(world(), "misspelled").await;
    let plane = &field.world.plane;
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
        plane.kubectl(&["apply", "--namespace", &field.namespace, &validate, "-f", &file])
    };
    let path = |typo: &str| {
        format!("strict decoding error: unknown field \"spec.template.spec.containers[0].{typo}\"")
    };
    let refusal = |applied: anyhow::Result<String>| format!("{:#}", applied.unwrap_err());

    let why = refusal(apply("example.com/app:1", "readynessProbe", "strict"));
    assert!(why.contains(&path("readynessProbe")), "{why}");
    apply("example.com/app:1", "readynessProbe", "warn").unwrap();
    apply("example.com/app:2", "readynessProbe", "strict").expect("it was applied before");
    let why = refusal(apply("example.com/app:3", "livenesProbe", "strict"));
    assert!(why.contains(&path("livenesProbe")), "{why}");
    apply("example.com/app:3", "livenessProbe", "strict").unwrap();
    field.settled("web").await;
}

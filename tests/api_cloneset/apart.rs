//! What other releases and outages of ours leave behind, on an API server that knows more of Pods than our types do.

use kruise_api::cloneset::CloneSet;
use kruise_api::webhooks::{MUTATING, VALIDATING};
use serde_json::{Value, json};
use testbed::cluster::{Options, wait};

use crate::field::{Field, identities};
use crate::refused::pods_in_mid_update_are_finished;
use crate::waits;
use crate::world::{PATIENCE, World, until};

/// Fields of Pods that came after the release that our types are of, each behind a gate of its own.
const GATES: &str = "HostnameOverride=true,ContainerRestartRules=true";

/// A template that leaves everything to the API server's defaults, and uses what our types do not know.
fn template() -> Value {
    let rules = json!([{ "action": "Restart", "exitCodes": { "operator": "In", "values": [42] } }]);
    json!({ "spec": {
        "hostnameOverride": "of-a-later-release",
        "containers": [{
            "name": "app", "image": "example.com/app:1", "ports": [{ "containerPort": 80 }],
            "restartPolicy": "Never", "restartPolicyRules": rules,
        }],
    } })
}

/// Whether the webhook fills in defaults.
fn filled_in(world: &World, namespace: &str) -> bool {
    let labels = json!({ "app": "probe" });
    let probe = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
        "metadata": { "name": "probe", "namespace": namespace },
        "spec": { "replicas": 0, "selector": { "matchLabels": labels }, "template": {
            "metadata": { "labels": labels },
            "spec": { "containers": [{ "name": "c", "image": "i:1" }] },
        } },
    });
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), probe.to_string()).unwrap();
    let file = file.path().to_str().unwrap();
    let made = world
        .plane
        .kubectl(&["create", "--dry-run=server", "-o=json", "-f", file]);
    made.is_ok_and(|made| made.contains("ClusterFirst"))
}

fn until_filled_in(world: &World, namespace: &str, wanted: bool) {
    let probe = || Ok((filled_in(world, namespace) == wanted).then_some(()));
    wait::until("the webhook is as wanted", PATIENCE, probe).unwrap();
}

/// What must not become other.
#[derive(Debug, PartialEq)]
struct State {
    pods: Vec<(String, String)>,
    revisions: Vec<String>,
    update: String,
}

async fn state(field: &Field, set: &str) -> State {
    let update = field.settled(set).await.status.unwrap().update_revision;
    let revisions = field.api("apps", "v1", "ControllerRevision");
    let revisions = revisions
        .list(&Default::default())
        .await
        .unwrap()
        .items
        .into_iter();
    State {
        pods: identities(&field.pods_of(set).await),
        revisions: revisions
            .filter_map(|r| r.metadata.name)
            .filter(|name| name.starts_with(&format!("{set}-")))
            .collect(),
        update,
    }
}

/// What a Pod says in fields that our types do not know.
fn unknown(pod: &Value) -> Value {
    let container = &pod["spec"]["containers"][0];
    json!([
        pod["spec"]["hostnameOverride"],
        container["restartPolicy"],
        container["restartPolicyRules"]
    ])
}

/// A template that no Pod can be made of is refused by the webhook; without it, the manager says so and makes none.
async fn nothing_is_made_of_a_mistake(field: &Field) {
    let containers = json!([{ "name": "app", "image": "i:1", "ports": [{ "containerPort": 99_999 }] }]);
    field
        .set(
            "mistaken",
            json!({ "template": { "spec": { "containers": containers } } }),
        )
        .await;
    let said = |set: &CloneSet, type_: &str, status: &str| {
        let conditions = set.status.iter().flat_map(|s| &s.conditions);
        let mut of = conditions.filter(|c| c.type_ == type_ && c.status == status);
        of.any(|c| {
            c.message
                .contains("spec.template.spec.containers[0].ports[0].containerPort: Invalid value: 99999")
        })
    };
    until(
        &field.sets(),
        "mistaken",
        "told what is wrong",
        |set: &CloneSet| said(set, "FailedUpdate", "True") && said(set, "Waiting", "True"),
    )
    .await;
    assert!(field.pods_of("mistaken").await.is_empty());
    field
        .sets()
        .delete("mistaken", &Default::default())
        .await
        .unwrap();
}

/// Fields that nobody knows, nested deeper than any reader of ours follows, are as good to the API server as others.
fn too_deep(field: &Field) -> Result<String, String> {
    let deep = format!("{}1{}", "[".repeat(1000), "]".repeat(1000));
    let labels = json!({ "app": "deep" });
    let object = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
        "metadata": { "name": "deep", "namespace": field.namespace },
        "spec": { "selector": { "matchLabels": labels }, "template": { "metadata": { "labels": labels },
            "spec": { "containers": [{ "name": "c", "image": "i:1" }], "unknown": "DEEP" } } },
    });
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), object.to_string().replace("\"DEEP\"", &deep)).unwrap();
    let create = ["create", "--validate=false", "-f", file.path().to_str().unwrap()];
    field
        .world
        .plane
        .kubectl(&create)
        .map_err(|why| format!("{why:#}"))
}

/// Takes the webhooks away, as an outage or somebody's mistake does.
pub fn without_webhooks(field: &Field) {
    for (kind, name) in [("mutating", MUTATING), ("validating", VALIDATING)] {
        let kind = format!("{kind}webhookconfiguration");
        field.world.plane.kubectl(&["delete", &kind, name]).unwrap();
    }
    until_filled_in(field.world, &field.namespace, false);
}

fn with_webhooks_again(field: &Field) {
    let webhooks = format!("{}/../deploy/webhooks", env!("CARGO_MANIFEST_DIR"));
    field.world.plane.kubectl(&["apply", "-k", &webhooks]).unwrap();
    until_filled_in(field.world, &field.namespace, true);
}

fn with_defaults(set: &CloneSet) -> bool {
    let spec = &set.spec.template["spec"];
    spec["dnsPolicy"] == "ClusterFirst" && spec["containers"][0]["imagePullPolicy"] == "Always"
}

/// Waits until the manager has logged these words about the CloneSet.
async fn logged(field: &Field, words: &str, set: &str) {
    let log = field.world.plane.dir().join("kruise-manager.log");
    waits::logged(&log, words, &format!("set={}/{set}", field.namespace)).await;
}

/// What was stored without defaults gets them from the manager, and loses nothing.
async fn defaults_are_stored(field: &Field, before: &State) {
    let set = field
        .status("web", "its defaults are stored", with_defaults)
        .await;
    assert_eq!(state(field, "web").await, *before, "defaults are no change");
    logged(
        field,
        "stored the defaults that the template was stored without",
        "web",
    )
    .await;
    let mut said = template();
    json_patch::merge(&mut said, &set.spec.template);
    assert_eq!(said, set.spec.template, "what was said stays");
    assert_eq!(unknown(&said), unknown(&template()));
}

/// What the API server does not know is not dropped, so that such a template stays as it is.
async fn unknown_fields_are_kept(field: &Field) {
    let odd = field
        .set(
            "odd",
            json!({ "template": { "spec": { "unknown": { "a": 1 } } } }),
        )
        .await;
    field.settled("odd").await;
    let event = field.event("UnknownField", "odd").await;
    assert_eq!(event["type"], "Warning");
    assert_eq!(
        event["message"],
        "unknown fields are left out; look for a misspelling: spec.template.spec.unknown"
    );
    logged(field, "template and revision differ in defaults", "odd").await;
    let now = field.sets().get("odd").await.unwrap();
    assert_eq!(now.metadata.generation, odd.metadata.generation);
    assert_eq!(now.spec.template["spec"]["unknown"], json!({ "a": 1 }));
}

/// A manifest that is applied by server-side apply, and again.
struct Applied<'a> {
    field: &'a Field,
    file: tempfile::NamedTempFile,
}

impl<'a> Applied<'a> {
    fn new(field: &'a Field) -> Self {
        let labels = json!({ "app": "applied" });
        let manifest = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "applied", "namespace": field.namespace },
            "spec": { "replicas": 1, "selector": { "matchLabels": labels }, "template": {
                "metadata": { "labels": labels },
                "spec": { "containers": [{ "name": "app", "image": "example.com/app:1" }] },
            } },
        });
        let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
        std::fs::write(file.path(), manifest.to_string()).unwrap();
        Self { field, file }
    }

    fn apply(&self) {
        let apply = ["apply", "--server-side", "-f", self.file.path().to_str().unwrap()];
        self.field.world.plane.kubectl(&apply).unwrap();
    }
}

/// Touches that change nothing of what Pods are made of.
async fn nothing_comes_of_touches(field: &Field, before: &State) {
    let same = field.sets().get("web").await.unwrap().spec.template;
    let labels = json!({ "touched": "1" });
    for touch in [
        json!({ "metadata": { "labels": labels }, "spec": { "template": same } }),
        json!({ "spec": { "revisionHistoryLimit": 7 } }),
        // The webhook fills in what the manifest does not say.
        json!({ "spec": { "template": template() } }),
    ] {
        field.edit("web", touch.clone()).await;
        assert_eq!(state(field, "web").await, *before, "{touch}");
    }
    assert!(with_defaults(&field.sets().get("web").await.unwrap()));
}

/// An update in place changes the image, and leaves what nobody here knows.
async fn only_the_image_changes(field: &Field, before: &State, said: &Value) {
    field.image("web", "example.com/app:2").await;
    field.settled("web").await;
    let after = field.pods_of("web").await;
    assert_eq!(identities(&after), before.pods);
    for pod in &after {
        assert_eq!(pod["spec"]["containers"][0]["image"], "example.com/app:2");
        assert_eq!(unknown(pod), *said);
    }
    let mut whole = field.pod_writes();
    whole.retain(|(verb, ..)| verb == "update");
    assert_eq!(whole, [], "Pods were written whole");
}

#[tokio::test]
async fn what_was_stored_without_a_webhook_keeps_its_pods_and_fields_that_nobody_knows() {
    let options = Options {
        gates: GATES,
        ..Options::default()
    };
    let world: &'static World = Box::leak(Box::new(World::with(options)));
    let mut manager = world.manager("kruise-manager");
    manager.start().unwrap();
    let field = Field::new(world, "apart").await;
    until_filled_in(world, &field.namespace, true);
    let refused = too_deep(&field).unwrap_err();
    assert!(refused.contains("cannot be read"), "{refused}");
    without_webhooks(&field);
    too_deep(&field).unwrap();
    let event = json!(field.event("Unreadable", "deep").await);
    let why = event["message"].as_str().unwrap();
    assert!(why.contains("recursion limit"), "{why}");
    // What follows is seen all the same, by this manager and by the next one, which has to list it.
    nothing_is_made_of_a_mistake(&field).await;
    pods_in_mid_update_are_finished(world).await;

    let set = field.set("web", json!({ "template": template() })).await;
    let filled = &set.spec.template["spec"]["dnsPolicy"];
    assert!(filled.is_null(), "somebody filled in defaults");
    let before = state(&field, "web").await;
    let said = unknown(&field.pods_of("web").await[0]);
    assert!(said[0] == "of-a-later-release" && said[2].is_array(), "{said}");

    defaults_are_stored(&field, &before).await;
    unknown_fields_are_kept(&field).await;
    let applied = Applied::new(&field);
    applied.apply();
    field
        .status("applied", "its defaults are stored", with_defaults)
        .await;
    let left = state(&field, "applied").await;

    with_webhooks_again(&field);
    // No conflict with the manager.
    applied.apply();
    assert_eq!(state(&field, "applied").await, left);
    nothing_comes_of_touches(&field, &before).await;
    manager.kill().unwrap();
    manager.start().unwrap();
    let touch = json!({ "spec": { "revisionHistoryLimit": 8 } });
    field.edit("web", touch).await;
    assert_eq!(state(&field, "web").await, before, "with another manager");
    only_the_image_changes(&field, &before, &said).await;
}

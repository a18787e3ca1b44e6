//! What other releases and outages of ours leave behind, on an API server with Pod fields that our types lack.

use kruise_api::cloneset::CloneSet;
use kruise_api::webhooks::{MUTATING, VALIDATING};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlaneOptions, wait};

use crate::fixture::{Fixture, identities};
use crate::template_rejected::rejected_template_finishes_running_update;
use crate::test_cluster::{TestCluster, WAIT_TIMEOUT, wait_until};
use crate::waits;

/// Pod fields that are newer than our types, each behind its own feature gate.
const GATES: &str = "HostnameOverride=true,ContainerRestartRules=true";

/// A template that relies on the API server's defaults and uses fields unknown to our types.
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

/// Whether the webhook sets defaults.
fn webhook_sets_defaults(cluster: &TestCluster, namespace: &str) -> bool {
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
    let created = cluster
        .plane
        .kubectl(&["create", "--dry-run=server", "-o=json", "-f", file]);
    created.is_ok_and(|created| created.contains("ClusterFirst"))
}

fn wait_for_webhook_defaults(cluster: &TestCluster, namespace: &str, expected: bool) {
    let probe = || Ok((webhook_sets_defaults(cluster, namespace) == expected).then_some(()));
    wait::until("the webhook is as wanted", WAIT_TIMEOUT, probe).unwrap();
}

/// What must not change.
#[derive(Debug, PartialEq)]
struct SetSnapshot {
    pods: Vec<(String, String)>,
    revisions: Vec<String>,
    update_revision: String,
}

async fn set_snapshot(fixture: &Fixture, set: &str) -> SetSnapshot {
    let update_revision = fixture.wait_settled(set).await.status.unwrap().update_revision;
    let revisions = fixture.api("apps", "v1", "ControllerRevision");
    let revisions = revisions
        .list(&Default::default())
        .await
        .unwrap()
        .items
        .into_iter();
    SetSnapshot {
        pods: identities(&fixture.pods_of(set).await),
        revisions: revisions
            .filter_map(|r| r.metadata.name)
            .filter(|name| name.starts_with(&format!("{set}-")))
            .collect(),
        update_revision,
    }
}

/// Values of a Pod's fields that our types lack.
fn unknown_pod_fields(pod: &Value) -> Value {
    let container = &pod["spec"]["containers"][0];
    json!([
        pod["spec"]["hostnameOverride"],
        container["restartPolicy"],
        container["restartPolicyRules"]
    ])
}

/// The webhook rejects a template that is no valid Pod; without the webhook, the manager reports that and creates no
/// Pods.
async fn invalid_template_creates_no_pods(fixture: &Fixture) {
    let containers = json!([{ "name": "app", "image": "i:1", "ports": [{ "containerPort": 99_999 }] }]);
    fixture
        .create_cloneset(
            "mistaken",
            json!({ "template": { "spec": { "containers": containers } } }),
        )
        .await;
    let has_condition = |set: &CloneSet, type_: &str, status: &str| {
        let conditions = set.status.iter().flat_map(|s| &s.conditions);
        let mut matching = conditions.filter(|c| c.type_ == type_ && c.status == status);
        matching.any(|c| {
            c.message
                .contains("spec.template.spec.containers[0].ports[0].containerPort: Invalid value: 99999")
        })
    };
    wait_until(
        &fixture.sets(),
        "mistaken",
        "reports what is wrong",
        |set: &CloneSet| has_condition(set, "FailedUpdate", "True") && has_condition(set, "Waiting", "True"),
    )
    .await;
    assert!(fixture.pods_of("mistaken").await.is_empty());
    fixture
        .sets()
        .delete("mistaken", &Default::default())
        .await
        .unwrap();
}

/// The API server accepts unknown fields that are nested deeper than any of our parsers follows.
fn apply_deeply_nested(fixture: &Fixture) -> Result<String, String> {
    let deep = format!("{}1{}", "[".repeat(1000), "]".repeat(1000));
    let labels = json!({ "app": "deep" });
    let object = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
        "metadata": { "name": "deep", "namespace": fixture.namespace },
        "spec": { "selector": { "matchLabels": labels }, "template": { "metadata": { "labels": labels },
            "spec": { "containers": [{ "name": "c", "image": "i:1" }], "unknown": "DEEP" } } },
    });
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), object.to_string().replace("\"DEEP\"", &deep)).unwrap();
    let create = ["create", "--validate=false", "-f", file.path().to_str().unwrap()];
    fixture
        .cluster
        .plane
        .kubectl(&create)
        .map_err(|message| format!("{message:#}"))
}

/// Removes the webhooks, as an outage or a user's mistake does.
pub fn remove_webhooks(fixture: &Fixture) {
    for (kind, name) in [("mutating", MUTATING), ("validating", VALIDATING)] {
        let kind = format!("{kind}webhookconfiguration");
        fixture.cluster.plane.kubectl(&["delete", &kind, name]).unwrap();
    }
    wait_for_webhook_defaults(fixture.cluster, &fixture.namespace, false);
}

fn restore_webhooks(fixture: &Fixture) {
    let webhooks = format!("{}/../deploy/webhooks", env!("CARGO_MANIFEST_DIR"));
    fixture
        .cluster
        .plane
        .kubectl(&["apply", "-k", &webhooks])
        .unwrap();
    wait_for_webhook_defaults(fixture.cluster, &fixture.namespace, true);
}

fn has_defaults(set: &CloneSet) -> bool {
    let spec = &set.spec.template["spec"];
    spec["dnsPolicy"] == "ClusterFirst" && spec["containers"][0]["imagePullPolicy"] == "Always"
}

/// Waits until the manager has logged this text about the CloneSet.
async fn wait_for_log(fixture: &Fixture, text: &str, set: &str) {
    let log = fixture.cluster.plane.dir().join("kruise-manager.log");
    waits::wait_for_log(&log, text, &format!("set={}/{set}", fixture.namespace)).await;
}

/// An object that was stored without defaults gets them from the manager, and loses nothing.
async fn check_defaults_are_stored(fixture: &Fixture, before: &SetSnapshot) {
    let set = fixture
        .wait_status("web", "its defaults are stored", has_defaults)
        .await;
    assert_eq!(
        set_snapshot(fixture, "web").await,
        *before,
        "defaults are no change"
    );
    wait_for_log(
        fixture,
        "stored the defaults that the template was stored without",
        "web",
    )
    .await;
    let mut merged = template();
    json_patch::merge(&mut merged, &set.spec.template);
    assert_eq!(merged, set.spec.template, "what was said stays");
    assert_eq!(unknown_pod_fields(&merged), unknown_pod_fields(&template()));
}

/// Fields unknown to the API server are not dropped; such a template is not changed.
async fn check_unknown_fields_are_kept(fixture: &Fixture) {
    let with_unknown_field = fixture
        .create_cloneset(
            "odd",
            json!({ "template": { "spec": { "unknown": { "a": 1 } } } }),
        )
        .await;
    fixture.wait_settled("odd").await;
    let event = fixture.wait_event("UnknownField", "odd").await;
    assert_eq!(event["type"], "Warning");
    assert_eq!(
        event["message"],
        "unknown fields are left out; look for a misspelling: spec.template.spec.unknown"
    );
    wait_for_log(fixture, "template and revision differ in defaults", "odd").await;
    let current = fixture.sets().get("odd").await.unwrap();
    assert_eq!(
        current.metadata.generation,
        with_unknown_field.metadata.generation
    );
    assert_eq!(current.spec.template["spec"]["unknown"], json!({ "a": 1 }));
}

/// A manifest that is applied by server-side apply, repeatedly.
struct ServerSideApply<'a> {
    fixture: &'a Fixture,
    file: tempfile::NamedTempFile,
}

impl<'a> ServerSideApply<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let labels = json!({ "app": "applied" });
        let manifest = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "applied", "namespace": fixture.namespace },
            "spec": { "replicas": 1, "selector": { "matchLabels": labels }, "template": {
                "metadata": { "labels": labels },
                "spec": { "containers": [{ "name": "app", "image": "example.com/app:1" }] },
            } },
        });
        let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
        std::fs::write(file.path(), manifest.to_string()).unwrap();
        Self { fixture, file }
    }

    fn apply(&self) {
        let apply = ["apply", "--server-side", "-f", self.file.path().to_str().unwrap()];
        self.fixture.cluster.plane.kubectl(&apply).unwrap();
    }
}

/// Edits that change nothing in the Pods' template.
async fn check_no_op_edits_change_nothing(fixture: &Fixture, before: &SetSnapshot) {
    let same = fixture.sets().get("web").await.unwrap().spec.template;
    let labels = json!({ "touched": "1" });
    for edit in [
        json!({ "metadata": { "labels": labels }, "spec": { "template": same } }),
        json!({ "spec": { "revisionHistoryLimit": 7 } }),
        // The webhook sets what the manifest leaves out.
        json!({ "spec": { "template": template() } }),
    ] {
        fixture.patch_set("web", edit.clone()).await;
        assert_eq!(set_snapshot(fixture, "web").await, *before, "{edit}");
    }
    assert!(has_defaults(&fixture.sets().get("web").await.unwrap()));
}

/// An in-place update changes the image, and keeps fields unknown to our types.
async fn check_only_image_changes(fixture: &Fixture, before: &SetSnapshot, unknown_fields: &Value) {
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_settled("web").await;
    let after = fixture.pods_of("web").await;
    assert_eq!(identities(&after), before.pods);
    for pod in &after {
        assert_eq!(pod["spec"]["containers"][0]["image"], "example.com/app:2");
        assert_eq!(unknown_pod_fields(pod), *unknown_fields);
    }
    let mut full_updates = fixture.pod_writes();
    full_updates.retain(|(verb, ..)| verb == "update");
    assert_eq!(full_updates, [], "Pods were written whole");
}

#[tokio::test]
async fn objects_stored_without_webhooks_keep_pods_and_unknown_fields() {
    let options = ControlPlaneOptions {
        feature_gates: GATES,
        ..ControlPlaneOptions::default()
    };
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::with_options(options)));
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    let fixture = Fixture::new(cluster, "apart").await;
    wait_for_webhook_defaults(cluster, &fixture.namespace, true);
    let error = apply_deeply_nested(&fixture).unwrap_err();
    assert!(error.contains("cannot be read"), "{error}");
    remove_webhooks(&fixture);
    apply_deeply_nested(&fixture).unwrap();
    let event = json!(fixture.wait_event("Unreadable", "deep").await);
    let message = event["message"].as_str().unwrap();
    assert!(message.contains("recursion limit"), "{message}");
    // Later changes are still observed, by this manager and by the next one, which has to list the object.
    invalid_template_creates_no_pods(&fixture).await;
    rejected_template_finishes_running_update(cluster).await;

    let set = fixture
        .create_cloneset("web", json!({ "template": template() }))
        .await;
    let dns_policy = &set.spec.template["spec"]["dnsPolicy"];
    assert!(dns_policy.is_null(), "defaults were set");
    let before = set_snapshot(&fixture, "web").await;
    let unknown_fields = unknown_pod_fields(&fixture.pods_of("web").await[0]);
    assert!(
        unknown_fields[0] == "of-a-later-release" && unknown_fields[2].is_array(),
        "{unknown_fields}"
    );

    check_defaults_are_stored(&fixture, &before).await;
    check_unknown_fields_are_kept(&fixture).await;
    let applied = ServerSideApply::new(&fixture);
    applied.apply();
    fixture
        .wait_status("applied", "its defaults are stored", has_defaults)
        .await;
    let before_reapply = set_snapshot(&fixture, "applied").await;

    restore_webhooks(&fixture);
    // No conflict with the manager.
    applied.apply();
    assert_eq!(set_snapshot(&fixture, "applied").await, before_reapply);
    check_no_op_edits_change_nothing(&fixture, &before).await;
    manager.kill().unwrap();
    manager.start().unwrap();
    let edit = json!({ "spec": { "revisionHistoryLimit": 8 } });
    fixture.patch_set("web", edit).await;
    assert_eq!(
        set_snapshot(&fixture, "web").await,
        before,
        "with another manager"
    );
    check_only_image_changes(&fixture, &before, &unknown_fields).await;
}

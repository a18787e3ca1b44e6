//! What stands in the way of one Pod delays that Pod alone.

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};
use testbed::cluster::wait;
use tokio::task::JoinHandle;

use crate::errors::says;
use crate::field::{Field, identities};
use crate::lost::shared;
use crate::pods::{name, runs, serves, state};
use crate::proxy::Loss;
use crate::world::{PATIENCE, world};
use support::untyped::untyped;

/// Pods with this label are nobody's to change.
pub const LOCK: &str = "example.com/locked";
const NEW: &str = "example.com/app:2";

fn policies(field: &Field, kind: &str) -> Api<DynamicObject> {
    untyped(&field.admin, "admissionregistration.k8s.io", "v1", kind, None)
}

/// The policy of a test, named as its namespace, for changes of this resource or subresource there; in effect soon after.
pub async fn policy(field: &Field, resource: &str, (expression, message): (&str, &str)) {
    let rule = json!({ "apiGroups": ["", "apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": [resource] });
    let name = &field.namespace;
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": name } });
    let policy = json!({ "metadata": { "name": name }, "spec": {
        "failurePolicy": "Fail", "validations": [{ "expression": expression, "message": message }],
        "matchConstraints": { "resourceRules": [rule], "namespaceSelector": selector } } });
    field
        .create(&policies(field, "ValidatingAdmissionPolicy"), policy)
        .await;
    let binding = json!({ "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] } });
    field
        .create(&policies(field, "ValidatingAdmissionPolicyBinding"), binding)
        .await;
}

/// Has it refuse nothing any more.
pub async fn lift(field: &Field) {
    let nothing = Patch::Merge(json!({ "spec": { "validations": [{ "expression": "true" }] } }));
    policies(field, "ValidatingAdmissionPolicy")
        .patch(&field.namespace, &PatchParams::default(), &nothing)
        .await
        .unwrap();
}

/// A policy that refuses every change of the Pods with the label, but for their status.
pub async fn lock(field: &Field, pod: &str) {
    let unlocked = format!("!('{LOCK}' in oldObject.metadata.?labels.orValue({{}}))");
    policy(field, "pods", (&unlocked, "this Pod is locked")).await;
    let label = Patch::Merge(json!({ "metadata": { "labels": { LOCK: "yes" } } }));
    let params = PatchParams::default();
    field.pods().patch(pod, &params, &label).await.unwrap();
    let note = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/probe": "x" } } }));
    let probe = PatchParams::default().dry_run();
    let refused = || async {
        field
            .pods()
            .patch(pod, &probe, &note)
            .await
            .is_err()
            .then_some(())
    };
    field.until("the policy is in effect", refused).await;
}

/// Somebody who writes a Pod all the time, until it is dropped.
struct Writer(JoinHandle<()>);

impl Writer {
    fn of(field: &Field, pod: &str) -> Self {
        let (pods, pod) = (field.pods(), pod.to_owned());
        Self(tokio::spawn(async move {
            for number in 0_u64.. {
                let note =
                    json!({ "metadata": { "annotations": { "example.com/note": number.to_string() } } });
                // Whatever becomes of it, the next one follows.
                let _ = pods
                    .patch(&pod, &PatchParams::default(), &Patch::Merge(note))
                    .await;
            }
        }))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The manager's patches of Pods here, or of a subresource of theirs, tried or stored: name and code of the answer.
fn patches(field: &Field, subresource: Option<&str>) -> Vec<(String, i64)> {
    let plane = &field.world.plane;
    let mut all = [plane.writes().unwrap(), plane.dry_runs().unwrap()].concat();
    all.sort_by_key(|w| w["requestReceivedTimestamp"].to_string());
    let ours = all.iter().filter(|w| {
        let object = &w["objectRef"];
        w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
            && object["namespace"] == field.namespace.as_str()
            && object["resource"] == "pods"
            && object["subresource"].as_str() == subresource
            && w["verb"] == "patch"
    });
    let of = |w: &Value| {
        let name = w["objectRef"]["name"].as_str().unwrap().to_owned();
        (name, w["responseStatus"]["code"].as_i64().unwrap())
    };
    ours.map(of).collect()
}

/// Each Pod was asked for once before this one was again.
fn all_before_the_second_of(last: &String, names: &[String], tries: &[(String, i64)]) {
    let again = tries
        .iter()
        .enumerate()
        .filter(|(_, (name, _))| name == last)
        .nth(1);
    let before = &tries[..again.map_or(tries.len(), |(at, _)| at)];
    let mut before: Vec<&String> = before.iter().map(|(name, _)| name).collect();
    before.sort();
    assert_eq!(
        before,
        names.iter().collect::<Vec<_>>(),
        "each once in the first pass"
    );
}

/// The first pass asks for each Pod's change, and no version of a Pod is asked for.
fn each_once_before_the_locked_one_again(field: &Field, locked: &String, names: &[String]) {
    let tries = wait::until("the locked one is tried again", PATIENCE, || {
        let all = patches(field, None);
        let of_it = all.iter().filter(|(name, _)| name == locked);
        Ok((of_it.count() >= 3).then_some(all))
    });
    let tries = tries.unwrap();
    all_before_the_second_of(locked, names, &tries);
    let conflicts = tries.iter().filter(|(_, code)| *code == 409).count();
    assert_eq!(conflicts, 0, "a patch names what it changes, and no version");
}

#[tokio::test]
async fn a_pod_that_cannot_be_changed_holds_up_no_other() {
    let field = Field::new(world(), "locked").await;
    field.set("web", json!({ "replicas": 6 })).await;
    field.settled("web").await;
    let before = field.pods_of("web").await;
    let names: Vec<String> = before.iter().map(name).collect();
    let (locked, busy) = (&names[0], &names[1]);
    lock(&field, locked).await;
    let writer = Writer::of(&field, busy);
    field.image("web", NEW).await;
    let others = |pods: &[&Value]| {
        let done = |pod: &&&Value| runs(pod, NEW) && serves(pod);
        pods.iter().filter(done).count() == 5
    };
    let pods = field.until_pods("web", "all but one are updated", others).await;
    assert!(!runs(&pods[0], NEW), "it is locked");
    drop(writer);
    says(&field, "FailedUpdate", "this Pod is locked").await;

    each_once_before_the_locked_one_again(&field, locked, &names);
    lift(&field).await;
    field.settled("web").await;
    assert_eq!(identities(&field.pods_of("web").await), identities(&before));
}

/// A change of who holds a Pod unready is one of a list, so it names the version of the Pod, and is refused where
/// somebody is quicker.
#[tokio::test]
async fn a_conflict_holds_up_no_other_pod() {
    let bed = shared().await;
    let field = Field::new(bed.world, "conflict").await;
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" }, "markPodNotReady": true });
    let mut spec = json!({ "replicas": 4, "lifecycle": { "inPlaceUpdate": hook } });
    spec["template"] = json!({ "metadata": { "labels": { "example.com/hold": "yes" } } });
    field.set("web", spec).await;
    field.settled("web").await;
    let names: Vec<String> = field.pods_of("web").await.iter().map(name).collect();
    let quicker = &names[0];
    let from = patches(&field, Some("status")).len();
    let words = "somebody-was-quicker";
    bed.proxy
        .lose("conflict", "patch pods/status", Loss::Until(words), 1, usize::MAX);
    field.image("web", NEW).await;
    let asked = || async { (bed.proxy.lost("conflict").len() >= names.len()).then_some(()) };
    field.until("all are asked for", asked).await;
    let note = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": "x" } } }));
    let params = PatchParams::default();
    field.pods().patch(quicker, &params, &note).await.unwrap();
    let on = json!({ "metadata": { "annotations": { "example.com/note": words } } });
    field.edit("web", on).await;

    let held = |pods: &[&Value]| pods.iter().all(|pod| state(pod) == "PreparingUpdate");
    field.until_pods("web", "all are held", held).await;
    let tries = patches(&field, Some("status")).split_off(from);
    assert!(tries.contains(&(quicker.clone(), 409)), "{tries:?}");
    all_before_the_second_of(quicker, &names, &tries);
}

const REFUSAL: &str = "this image is not allowed";

/// A policy that refuses the new image in the Pods of this namespace; in effect.
async fn refuse_image(field: &Field, pod: &Value) {
    let expression = format!("object.spec.containers.all(c, c.image != '{NEW}')");
    policy(field, "pods", (&expression, REFUSAL)).await;
    let probe = PatchParams::default().dry_run();
    let image = Patch::Strategic(json!({ "spec": { "containers": [{ "name": "app", "image": NEW }] } }));
    let (pods, pod) = (field.pods(), name(pod));
    let in_effect = || async { pods.patch(&pod, &probe, &image).await.is_err().then_some(()) };
    field.until("the policy is in effect", in_effect).await;
}

fn grace(seconds: i32) -> Value {
    let strategy = json!({ "gracePeriodSeconds": seconds });
    json!({ "updateStrategy": { "rollingUpdate": { "inPlaceUpdateStrategy": strategy } } })
}

/// The manager has tried to change Pods so many times more without storing that.
async fn more_dry_runs(field: &Field, count: usize) {
    let tried = || {
        let all = field.dry_runs().into_iter();
        all.filter(|((_, what, _), _)| what == "pods").count()
    };
    let from = tried();
    let more = || async { (tried() >= from + count).then_some(()) };
    field.until("it is tried without storing it", more).await;
}

/// How often Pods leave their Services, and come back, for an image that is refused; of four Pods.
async fn leaves_for_a_refused_image(namespace: &'static str, seconds: i32) -> usize {
    let field = Field::new(world(), namespace).await;
    let mut spec = grace(seconds);
    spec["replicas"] = json!(4);
    field.set("web", spec).await;
    field.settled("web").await;
    let before = field.pods_of("web").await;
    refuse_image(&field, &before[0]).await;
    let left = || patches(&field, Some("status")).len();
    let from = left();
    field.image("web", NEW).await;
    says(&field, "FailedUpdate", REFUSAL).await;
    more_dry_runs(&field, 2).await;
    let serve = |pods: &[&Value]| pods.iter().all(|pod| serves(pod));
    let after = field.until_pods("web", "all serve", serve).await;
    assert_eq!(identities(&after), identities(&before));
    let count = left() - from;
    lift(&field).await;
    field.settled("web").await;
    count
}

/// What is refused once is tried without storing it before a Pod leaves its Services for it.
#[tokio::test]
async fn a_pod_leaves_its_services_once_for_an_image_that_is_refused() {
    let left = leaves_for_a_refused_image("refused-image", 0).await;
    assert!(left <= 2 * 4, "out and back, once for each at most");
}

/// The change that comes after the grace period is tried before it.
#[tokio::test]
async fn no_pod_leaves_its_services_for_an_image_that_is_refused_after_the_grace_period() {
    assert_eq!(leaves_for_a_refused_image("refused-later", 1).await, 0);
}

/// As with OpenKruise they wait for the change out of their Services; another image gets to them.
#[tokio::test]
async fn another_image_gets_to_pods_whose_image_is_refused_since_their_grace_period_began() {
    let field = Field::new(world(), "late-policy").await;
    field.set("web", json!({ "replicas": 4 })).await;
    field.settled("web").await;
    let before = field.pods_of("web").await;
    field.image_and("web", NEW, grace(3600)).await;
    let graced =
        |pod: &Value| pod["metadata"]["annotations"]["apps.kruise.io/inplace-update-grace"].is_string();
    let wait = |pods: &[&Value]| pods.iter().all(|pod| graced(pod) && !serves(pod));
    let waiting = field.until_pods("web", "all wait", wait).await;
    refuse_image(&field, &before[0]).await;
    for pod in &waiting {
        const STATE: &str = "apps.kruise.io/inplace-update-state";
        let text = pod["metadata"]["annotations"][STATE].as_str().unwrap();
        let mut state: Value = serde_json::from_str(text).unwrap();
        state["updateTimestamp"] = json!("2020-01-01T00:00:00Z");
        let over = Patch::Merge(json!({ "metadata": { "annotations": { STATE: state.to_string() } } }));
        let params = PatchParams::default();
        field.pods().patch(&name(pod), &params, &over).await.unwrap();
    }
    says(&field, "FailedUpdate", REFUSAL).await;
    let other = "example.com/app:3";
    field.image_and("web", other, grace(0)).await;
    field.settled("web").await;
    let after = field.pods_of("web").await;
    assert_eq!(identities(&after), identities(&before));
    assert!(after.iter().all(|pod| !graced(pod) && runs(pod, other)));
    lift(&field).await;
}

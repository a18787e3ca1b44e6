//! An obstacle for one Pod delays only that Pod.

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testbed::cluster::wait;
use tokio::task::JoinHandle;

use crate::denied_updates::{LOCK_MESSAGE, allow_updates, deny_updates, lock_pod};
use crate::errors::wait_for_condition;
use crate::fixture::{Fixture, identities};
use crate::network_faults::proxied_cluster;
use crate::pods::{is_serving, lifecycle_state, name, runs_image};
use crate::proxy::NetworkFault;
use crate::test_cluster::{WAIT_TIMEOUT, shared_cluster};

const NEW_IMAGE: &str = "example.com/app:2";

/// Writes a Pod all the time, until dropped.
struct PodWriter(JoinHandle<()>);

impl PodWriter {
    fn start(fixture: &Fixture, pod: &str) -> Self {
        let (pods, pod) = (fixture.pods(), pod.to_owned());
        Self(tokio::spawn(async move {
            for number in 0_u64.. {
                let annotation =
                    json!({ "metadata": { "annotations": { "example.com/note": number.to_string() } } });
                // Whatever the result, the next write follows.
                let _ = pods
                    .patch(&pod, &PatchParams::default(), &Patch::Merge(annotation))
                    .await;
            }
        }))
    }
}

impl Drop for PodWriter {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The manager's patches of Pods here, or of a subresource, dry runs included: name and status code.
fn pod_patches(fixture: &Fixture, subresource: Option<&str>) -> Vec<(String, i64)> {
    let plane = &fixture.cluster.plane;
    let mut all = [plane.audited_writes().unwrap(), plane.dry_runs().unwrap()].concat();
    all.sort_by_key(|w| w["requestReceivedTimestamp"].to_string());
    let by_manager = all.iter().filter(|w| {
        let object = &w["objectRef"];
        w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
            && object["namespace"] == fixture.namespace.as_str()
            && object["resource"] == "pods"
            && object["subresource"].as_str() == subresource
            && w["verb"] == "patch"
    });
    let name_and_code = |w: &Value| {
        let name = w["objectRef"]["name"].as_str().unwrap().to_owned();
        (name, w["responseStatus"]["code"].as_i64().unwrap())
    };
    by_manager.map(name_and_code).collect()
}

/// Asserts that each Pod was tried once before this one was retried.
fn assert_each_tried_before_retry(retried: &String, names: &[String], attempts: &[(String, i64)]) {
    let second_attempt = attempts
        .iter()
        .enumerate()
        .filter(|(_, (name, _))| name == retried)
        .nth(1);
    let before = &attempts[..second_attempt.map_or(attempts.len(), |(at, _)| at)];
    let mut before: Vec<&String> = before.iter().map(|(name, _)| name).collect();
    before.sort();
    assert_eq!(
        before,
        names.iter().collect::<Vec<_>>(),
        "each once in the first pass"
    );
}

/// The first reconcile patches each Pod, and reads no Pod again.
fn check_locked_pod_delays_no_other(fixture: &Fixture, locked: &String, names: &[String]) {
    let attempts = wait::until("the locked one is tried again", WAIT_TIMEOUT, || {
        let all = pod_patches(fixture, None);
        let of_locked = all.iter().filter(|(name, _)| name == locked);
        Ok((of_locked.count() >= 3).then_some(all))
    });
    let attempts = attempts.unwrap();
    assert_each_tried_before_retry(locked, names, &attempts);
    let conflicts = attempts.iter().filter(|(_, code)| *code == 409).count();
    assert_eq!(conflicts, 0, "a patch names what it changes, and no version");
}

#[tokio::test]
async fn denied_pod_update_does_not_delay_other_pods() {
    let fixture = Fixture::new(shared_cluster(), "locked").await;
    fixture.create_cloneset("web", json!({ "replicas": 6 })).await;
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    let names: Vec<String> = before.iter().map(name).collect();
    let (locked, busy) = (&names[0], &names[1]);
    lock_pod(&fixture, locked).await;
    let writer = PodWriter::start(&fixture, busy);
    fixture.set_image("web", NEW_IMAGE).await;
    let others_updated = |pods: &[&Value]| {
        let updated = |pod: &&&Value| runs_image(pod, NEW_IMAGE) && is_serving(pod);
        pods.iter().filter(updated).count() == 5
    };
    let pods = fixture
        .wait_pods("web", "all but one are updated", others_updated)
        .await;
    assert!(!runs_image(&pods[0], NEW_IMAGE), "it is locked");
    drop(writer);
    wait_for_condition(&fixture, "FailedUpdate", LOCK_MESSAGE).await;

    check_locked_pod_delays_no_other(&fixture, locked, &names);
    allow_updates(&fixture).await;
    fixture.wait_settled("web").await;
    assert_eq!(identities(&fixture.pods_of("web").await), identities(&before));
}

/// The KruisePodReady message is a list of holders, so its patch has the Pod's resourceVersion and gets a conflict if
/// another writer is faster.
#[tokio::test]
async fn conflict_does_not_delay_other_pods() {
    let proxied = proxied_cluster().await;
    let fixture = Fixture::new(proxied.cluster, "conflict").await;
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" }, "markPodNotReady": true });
    let mut spec = json!({ "replicas": 4, "lifecycle": { "inPlaceUpdate": hook } });
    spec["template"] = json!({ "metadata": { "labels": { "example.com/hold": "yes" } } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let names: Vec<String> = fixture.pods_of("web").await.iter().map(name).collect();
    let conflicting = &names[0];
    let patches_before = pod_patches(&fixture, Some("status")).len();
    let marker = "somebody-was-quicker";
    proxied.proxy.inject(
        "conflict",
        "patch pods/status",
        NetworkFault::HoldUntil(marker),
        1,
        usize::MAX,
    );
    fixture.set_image("web", NEW_IMAGE).await;
    let all_requested =
        || async { (proxied.proxy.faulted_requests("conflict").len() >= names.len()).then_some(()) };
    fixture.poll_until("all are asked for", all_requested).await;
    let annotation = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": "x" } } }));
    let params = PatchParams::default();
    fixture
        .pods()
        .patch(conflicting, &params, &annotation)
        .await
        .unwrap();
    let with_marker = json!({ "metadata": { "annotations": { "example.com/note": marker } } });
    fixture.patch_set("web", with_marker).await;

    let preparing = |pods: &[&Value]| pods.iter().all(|pod| lifecycle_state(pod) == "PreparingUpdate");
    fixture.wait_pods("web", "all are held", preparing).await;
    let attempts = pod_patches(&fixture, Some("status")).split_off(patches_before);
    assert!(attempts.contains(&(conflicting.clone(), 409)), "{attempts:?}");
    assert_each_tried_before_retry(conflicting, &names, &attempts);
}

const DENIAL_MESSAGE: &str = "this image is not allowed";

/// Creates a policy that denies the new image in the Pods of this namespace; returns when it is enforced.
async fn deny_image(fixture: &Fixture, pod: &Value) {
    let expression = format!("object.spec.containers.all(c, c.image != '{NEW_IMAGE}')");
    deny_updates(fixture, "pods", (&expression, DENIAL_MESSAGE)).await;
    let probe = PatchParams::default().dry_run();
    let image =
        Patch::Strategic(json!({ "spec": { "containers": [{ "name": "app", "image": NEW_IMAGE }] } }));
    let (pods, pod) = (fixture.pods(), name(pod));
    let in_effect = || async { pods.patch(&pod, &probe, &image).await.is_err().then_some(()) };
    fixture.poll_until("the policy is in effect", in_effect).await;
}

fn grace_period(seconds: i32) -> Value {
    let strategy = json!({ "gracePeriodSeconds": seconds });
    json!({ "updateStrategy": { "rollingUpdate": { "inPlaceUpdateStrategy": strategy } } })
}

/// Waits until the manager has made `count` more dry runs of Pod changes.
async fn wait_for_dry_runs(fixture: &Fixture, count: usize) {
    let dry_run_count = || {
        let all = fixture.dry_runs().into_iter();
        all.filter(|((_, what, _), _)| what == "pods").count()
    };
    let count_before = dry_run_count();
    let enough = || async { (dry_run_count() >= count_before + count).then_some(()) };
    fixture.poll_until("it is tried without storing it", enough).await;
}

/// How often Pods leave their Services and come back for a denied image; with four Pods.
async fn count_unready_for_denied_image(namespace: &'static str, seconds: i32) -> usize {
    let fixture = Fixture::new(shared_cluster(), namespace).await;
    let mut spec = grace_period(seconds);
    spec["replicas"] = json!(4);
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    deny_image(&fixture, &before[0]).await;
    let status_patches = || pod_patches(&fixture, Some("status")).len();
    let patches_before = status_patches();
    fixture.set_image("web", NEW_IMAGE).await;
    wait_for_condition(&fixture, "FailedUpdate", DENIAL_MESSAGE).await;
    wait_for_dry_runs(&fixture, 2).await;
    let all_serve = |pods: &[&Value]| pods.iter().all(|pod| is_serving(pod));
    let after = fixture.wait_pods("web", "all serve", all_serve).await;
    assert_eq!(identities(&after), identities(&before));
    let count = status_patches() - patches_before;
    allow_updates(&fixture).await;
    fixture.wait_settled("web").await;
    count
}

/// After one denial, a dry run comes before a Pod leaves its Services for the change.
#[tokio::test]
async fn denied_image_makes_a_pod_unready_once() {
    let unready_count = count_unready_for_denied_image("refused-image", 0).await;
    assert!(unready_count <= 2 * 4, "out and back, once for each at most");
}

/// The change that comes after the grace period is tried by a dry run before it.
#[tokio::test]
async fn denied_image_with_grace_period_keeps_pods_ready() {
    assert_eq!(count_unready_for_denied_image("refused-later", 1).await, 0);
}

/// As with OpenKruise, they wait for the change out of their Services; another image reaches them.
#[tokio::test]
async fn new_image_reaches_pods_denied_during_grace_period() {
    let fixture = Fixture::new(shared_cluster(), "late-policy").await;
    fixture.create_cloneset("web", json!({ "replicas": 4 })).await;
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    fixture
        .set_image_and_spec("web", NEW_IMAGE, grace_period(3600))
        .await;
    let in_grace_period =
        |pod: &Value| pod["metadata"]["annotations"]["apps.kruise.io/inplace-update-grace"].is_string();
    let all_waiting = |pods: &[&Value]| pods.iter().all(|pod| in_grace_period(pod) && !is_serving(pod));
    let waiting = fixture.wait_pods("web", "all wait", all_waiting).await;
    deny_image(&fixture, &before[0]).await;
    for pod in &waiting {
        const STATE: &str = "apps.kruise.io/inplace-update-state";
        let text = pod["metadata"]["annotations"][STATE].as_str().unwrap();
        let mut state: Value = serde_json::from_str(text).unwrap();
        state["updateTimestamp"] = json!("2020-01-01T00:00:00Z");
        let expired = Patch::Merge(json!({ "metadata": { "annotations": { STATE: state.to_string() } } }));
        let params = PatchParams::default();
        fixture.pods().patch(&name(pod), &params, &expired).await.unwrap();
    }
    wait_for_condition(&fixture, "FailedUpdate", DENIAL_MESSAGE).await;
    let other = "example.com/app:3";
    fixture.set_image_and_spec("web", other, grace_period(0)).await;
    fixture.wait_settled("web").await;
    let after = fixture.pods_of("web").await;
    assert_eq!(identities(&after), identities(&before));
    assert!(
        after
            .iter()
            .all(|pod| !in_grace_period(pod) && runs_image(pod, other))
    );
    allow_updates(&fixture).await;
}

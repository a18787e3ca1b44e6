//! Claims of Pods through rollouts with surge, deletions and scaling: volumes are really provisioned and bound.

use std::collections::BTreeMap;
use std::ops::Deref;

use kruise_api::cloneset::CloneSetStatus;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::pods::{is_serving, label, name, runs_image};
use crate::untyped::untyped;
use crate::workloads::{NodeNamespace, TestCluster, shared_cluster, template};

const INSTANCE_ID_LABEL: &str = "apps.kruise.io/cloneset-instance-id";

/// Pods that each have a claim `data`, and record their start in it.
pub fn spec_with_claims(replicas: i32, rolling: Value, reuse: bool) -> Value {
    let mut template = template("web");
    template["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/volume" }]);
    template["spec"]["containers"][0]["lifecycle"] =
        json!({ "postStart": { "exec": { "command": ["sh", "-c", "echo $HOSTNAME >> /volume/starts"] } } });
    json!({
        "replicas": replicas,
        "template": template,
        "scaleStrategy": { "enablePVCReuse": reuse },
        "updateStrategy": { "rollingUpdate": rolling },
        "volumeClaimTemplates": [{ "metadata": { "name": "data" }, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } } }],
    })
}

/// UIDs of the claims, by their instance ID.
async fn claims_by_instance(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
) -> BTreeMap<String, String> {
    let all = ns.claims().list(&Default::default()).await.unwrap();
    let assert_bound = |claim: &Value| assert_eq!(claim["status"]["phase"], "Bound", "{claim}");
    all.items
        .iter()
        .map(|claim| {
            assert_bound(&json!(claim));
            (claim.labels()[INSTANCE_ID_LABEL].clone(), claim.uid().unwrap())
        })
        .collect()
}

/// Waits until there are `count` Pods and claims, none terminating; returns the claims, each of which belongs to a Pod.
pub async fn wait_pods_and_claims(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    count: usize,
) -> BTreeMap<String, String> {
    ns.wait_settled("web").await;
    // The status before a deletion equals the one after it.
    let all_serving = |pods: &[&Value]| pods.len() == count && pods.iter().all(|pod| is_serving(pod));
    let pods = ns
        .wait_pods("web", "these serve, and there are no others", all_serving)
        .await;
    ns.poll_until("the others' claims to be gone", || async {
        let all = ns.claims().list(&Default::default()).await.unwrap();
        (all.items.len() == count).then_some(())
    })
    .await;
    let claims = claims_by_instance(ns).await;
    let ids: Vec<String> = pods.iter().map(|pod| label(pod, INSTANCE_ID_LABEL)).collect();
    assert!(ids.iter().all(|id| claims.contains_key(id)), "{ids:?} {claims:?}");
    claims
}

/// The starts recorded in the volume of a Pod.
fn recorded_starts(ns: &NodeNamespace<impl Deref<Target = TestCluster>>, pod: &str) -> Vec<String> {
    let output = ns.kubectl(&["exec", pod, "--", "cat", "/volume/starts"]);
    output.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn recreate_surge_creates_and_deletes_claims() {
    let ns = shared_cluster().await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    ns.create_set("web", spec_with_claims(3, rolling, true)).await;
    let before = wait_pods_and_claims(&ns, 3).await;
    let monitor = ns.monitor_pods("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    let after = wait_pods_and_claims(&ns, 3).await;
    assert!(
        after.values().all(|uid| !before.values().any(|old| old == uid)),
        "{before:?} {after:?}"
    );
    let pods = ns.pods_of("web").await;
    assert!(
        pods.values().all(|pod| runs_image(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    for pod in pods.keys() {
        assert_eq!(recorded_starts(&ns, pod), [pod.as_str()]);
    }
    let observed = monitor.observed();
    assert!(
        observed.min_serving >= 3 && observed.max_pods == 4,
        "{observed:#?}"
    );
    assert_eq!(observed.all_uids.len(), 6, "{observed:#?}");
}

#[tokio::test]
async fn in_place_surge_keeps_serving_and_volume_data() {
    let ns = shared_cluster().await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 0, "maxSurge": 1 });
    ns.create_set("web", spec_with_claims(3, rolling, false)).await;
    let before = wait_pods_and_claims(&ns, 3).await;
    let pods = ns.pod_uids("web").await;
    let monitor = ns.monitor_pods("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    let after = wait_pods_and_claims(&ns, 3).await;
    let observed = monitor.observed();
    assert!(
        observed.min_serving >= 3 && observed.max_pods == 4,
        "{observed:#?}"
    );
    assert_eq!(
        observed.all_uids.len(),
        4,
        "one more for the time of the rollout: {observed:#?}"
    );
    let remaining = ns.pod_uids("web").await;
    let untouched: Vec<&String> = remaining
        .keys()
        .filter(|name| pods.get(*name) == remaining.get(*name))
        .collect();
    assert!(untouched.len() >= 2, "{pods:?} {remaining:?}");
    for pod in untouched {
        assert_eq!(
            recorded_starts(&ns, pod),
            [pod.as_str(), pod.as_str()],
            "before and after its update"
        );
        let id = pod.trim_start_matches("web-");
        assert_eq!(before[id], after[id]);
    }
}

#[tokio::test]
async fn claim_of_deleted_pod_is_reused_or_deleted() {
    let ns = shared_cluster().await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 1 });
    ns.create_set("web", spec_with_claims(2, rolling, true)).await;
    let before = wait_pods_and_claims(&ns, 2).await;
    let victim = name(ns.pods_of("web").await.values().next().unwrap());
    ns.kubectl(&["delete", "pod", &victim]);
    let after = wait_pods_and_claims(&ns, 2).await;
    assert_eq!(before, after, "kept, with what they hold");
    assert_eq!(
        recorded_starts(&ns, &victim),
        [victim.as_str(), victim.as_str()],
        "it has the name of its volume"
    );

    ns.patch_set(
        "web",
        json!({ "spec": { "scaleStrategy": { "enablePVCReuse": null } } }),
    )
    .await;
    ns.wait_settled("web").await;
    ns.kubectl(&["delete", "pod", &victim]);
    let after = wait_pods_and_claims(&ns, 2).await;
    let id = victim.trim_start_matches("web-");
    assert!(
        !after.contains_key(id) && after.len() == 2,
        "{before:?} {after:?}"
    );

    // Surplus Pods are deleted with their claims, whatever the retention policy.
    ns.patch_set(
        "web",
        json!({ "spec": { "replicas": 1, "scaleStrategy": { "enablePVCReuse": true } } }),
    )
    .await;
    let remaining = wait_pods_and_claims(&ns, 1).await;
    assert!(
        after
            .iter()
            .any(|claim| remaining.iter().any(|kept| kept == claim))
    );
    ns.patch_set("web", json!({ "spec": { "replicas": 2 } })).await;
    let scaled_up = wait_pods_and_claims(&ns, 2).await;
    assert!(
        scaled_up
            .iter()
            .any(|claim| !after.iter().any(|old| old == claim)),
        "a claim of its own: {scaled_up:?}"
    );
}

#[tokio::test]
async fn missing_storage_class_is_reported_in_status() {
    let ns = shared_cluster().await;
    let mut spec = spec_with_claims(1, json!({}), false);
    spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] = json!("folders-to-come");
    ns.create_set("web", spec).await;
    let expected_messages = [
        "unbound immediate PersistentVolumeClaims",
        "its claim of storage class folders-to-come is not bound",
    ];
    let is_reported = |status: &CloneSetStatus| {
        let waiting = status.conditions.iter().find(|c| c.type_ == "Waiting");
        waiting.is_some_and(|c| expected_messages.iter().all(|word| c.message.contains(word)))
    };
    ns.wait_status("web", "the scheduler's words, and the class", is_reported)
        .await;
    let class =
        json!({ "metadata": { "name": "folders-to-come" }, "provisioner": "kubernetes.io/host-path" });
    let classes = untyped(&ns.admin, "storage.k8s.io", "v1", "StorageClass", None);
    ns.create(&classes, class).await;
    wait_pods_and_claims(&ns, 1).await;
}

//! Claims of Pods through rollouts with surge, deletions and scaling: volumes are made and bound for real.

use std::collections::BTreeMap;
use std::ops::Deref;

use kruise_api::cloneset::CloneSetStatus;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::pods::{label, name, runs, serves};
use crate::untyped::untyped;
use crate::workloads::{Bed, Space, shared, template};

const ID: &str = "apps.kruise.io/cloneset-instance-id";

/// Pods that each have a claim `data`, and note in it that they began.
pub fn with_claims(replicas: i32, rolling: Value, reuse: bool) -> Value {
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

/// UIDs of the claims, by the instance that they belong to.
async fn claims(space: &Space<impl Deref<Target = Bed>>) -> BTreeMap<String, String> {
    let all = space.claims().list(&Default::default()).await.unwrap();
    let bound = |claim: &Value| assert_eq!(claim["status"]["phase"], "Bound", "{claim}");
    all.items
        .iter()
        .map(|claim| {
            bound(&json!(claim));
            (claim.labels()[ID].clone(), claim.uid().unwrap())
        })
        .collect()
}

/// Waits until there are so many Pods and claims, none on its way out; the claims, each of which is of a Pod.
pub async fn at_rest(space: &Space<impl Deref<Target = Bed>>, count: usize) -> BTreeMap<String, String> {
    space.settled("web").await;
    // The status of before a deletion says the same as that of after it.
    let whole = |pods: &[&Value]| pods.len() == count && pods.iter().all(|pod| serves(pod));
    let pods = space
        .until_pods("web", "these serve, and there are no others", whole)
        .await;
    space
        .until("the others' claims to be gone", || async {
            let all = space.claims().list(&Default::default()).await.unwrap();
            (all.items.len() == count).then_some(())
        })
        .await;
    let claims = claims(space).await;
    let ids: Vec<String> = pods.iter().map(|pod| label(pod, ID)).collect();
    assert!(ids.iter().all(|id| claims.contains_key(id)), "{ids:?} {claims:?}");
    claims
}

/// What was noted in the volume of a Pod.
fn starts(space: &Space<impl Deref<Target = Bed>>, pod: &str) -> Vec<String> {
    let said = space.kubectl(&["exec", pod, "--", "cat", "/volume/starts"]);
    said.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn new_pods_of_a_surge_bring_their_claims_and_old_ones_take_theirs_along() {
    let space = shared().await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    space.set("web", with_claims(3, rolling, true)).await;
    let before = at_rest(&space, 3).await;
    let witness = space.witness("web").await;
    space.image("web", "kruise-test/term:2").await;
    let after = at_rest(&space, 3).await;
    assert!(
        after.values().all(|uid| !before.values().any(|old| old == uid)),
        "{before:?} {after:?}"
    );
    let pods = space.pods_of("web").await;
    assert!(
        pods.values().all(|pod| runs(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    for pod in pods.keys() {
        assert_eq!(starts(&space, pod), [pod.as_str()]);
    }
    let seen = witness.seen();
    assert!(seen.least_serving >= 3 && seen.most == 4, "{seen:#?}");
    assert_eq!(seen.ever.len(), 6, "{seen:#?}");
}

#[tokio::test]
async fn in_place_a_surge_keeps_all_serving_and_volumes_keep_what_they_hold() {
    let space = shared().await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 0, "maxSurge": 1 });
    space.set("web", with_claims(3, rolling, false)).await;
    let before = at_rest(&space, 3).await;
    let pods = space.identities("web").await;
    let witness = space.witness("web").await;
    space.image("web", "kruise-test/term:2").await;
    let after = at_rest(&space, 3).await;
    let seen = witness.seen();
    assert!(seen.least_serving >= 3 && seen.most == 4, "{seen:#?}");
    assert_eq!(
        seen.ever.len(),
        4,
        "one more for the time of the rollout: {seen:#?}"
    );
    let left = space.identities("web").await;
    let same: Vec<&String> = left
        .keys()
        .filter(|name| pods.get(*name) == left.get(*name))
        .collect();
    assert!(same.len() >= 2, "{pods:?} {left:?}");
    for pod in same {
        assert_eq!(
            starts(&space, pod),
            [pod.as_str(), pod.as_str()],
            "before and after its update"
        );
        let id = pod.trim_start_matches("web-");
        assert_eq!(before[id], after[id]);
    }
}

#[tokio::test]
async fn the_claim_of_a_pod_that_somebody_deleted_is_the_next_ones_or_goes_with_it() {
    let space = shared().await;
    let rolling = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 1 });
    space.set("web", with_claims(2, rolling, true)).await;
    let before = at_rest(&space, 2).await;
    let victim = name(space.pods_of("web").await.values().next().unwrap());
    space.kubectl(&["delete", "pod", &victim]);
    let after = at_rest(&space, 2).await;
    assert_eq!(before, after, "kept, with what they hold");
    assert_eq!(
        starts(&space, &victim),
        [victim.as_str(), victim.as_str()],
        "it has the name of its volume"
    );

    space
        .edit(
            "web",
            json!({ "spec": { "scaleStrategy": { "enablePVCReuse": null } } }),
        )
        .await;
    space.settled("web").await;
    space.kubectl(&["delete", "pod", &victim]);
    let after = at_rest(&space, 2).await;
    let id = victim.trim_start_matches("web-");
    assert!(
        !after.contains_key(id) && after.len() == 2,
        "{before:?} {after:?}"
    );

    // Pods that are too many take their claims along, whatever is to be kept.
    space
        .edit(
            "web",
            json!({ "spec": { "replicas": 1, "scaleStrategy": { "enablePVCReuse": true } } }),
        )
        .await;
    let left = at_rest(&space, 1).await;
    assert!(after.iter().any(|claim| left.iter().any(|kept| kept == claim)));
    space.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    let again = at_rest(&space, 2).await;
    assert!(
        again.iter().any(|claim| !after.iter().any(|old| old == claim)),
        "a claim of its own: {again:?}"
    );
}

#[tokio::test]
async fn a_storage_class_that_is_not_there_is_told_in_the_scheduler_s_words_until_it_is() {
    let space = shared().await;
    let mut spec = with_claims(1, json!({}), false);
    spec["volumeClaimTemplates"][0]["spec"]["storageClassName"] = json!("folders-to-come");
    space.set("web", spec).await;
    let words = [
        "unbound immediate PersistentVolumeClaims",
        "its claim of storage class folders-to-come is not bound",
    ];
    let told = |status: &CloneSetStatus| {
        let progressing = status.conditions.iter().find(|c| c.type_ == "Waiting");
        progressing.is_some_and(|c| words.iter().all(|word| c.message.contains(word)))
    };
    space
        .status("web", "the scheduler's words, and the class", told)
        .await;
    let class =
        json!({ "metadata": { "name": "folders-to-come" }, "provisioner": "kubernetes.io/host-path" });
    let classes = untyped(&space.admin, "storage.k8s.io", "v1", "StorageClass", None);
    space.create(&classes, class).await;
    at_rest(&space, 1).await;
}

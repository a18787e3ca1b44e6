//! From a Deployment to a CloneSet, as in `docs/user/cloneset.md`, while its Pods serve.

use std::collections::BTreeMap;
use std::ops::Deref;

use serde_json::{Value, json};

use crate::pods::{condition_is_true, container_status, name, runs_image, uids_by_name};
use crate::volumes::{spec_with_claims, wait_pods_and_claims};
use crate::workloads::{NodeNamespace, TestCluster, shared_cluster, template};

/// Creates a paused CloneSet that adopts these Pods unchanged.
async fn adopt_with_paused_set(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    before: &BTreeMap<String, Value>,
) {
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1, "paused": true });
    let set = json!({ "replicas": 3, "updateStrategy": { "rollingUpdate": rolling } });
    let created = ns.create_set("web", set).await;
    let uid = created.metadata.uid.unwrap();
    let is_adopted = |pod: &&Value| {
        let owners = pod["metadata"]["ownerReferences"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        owners.len() == 1 && owners[0]["uid"] == uid.as_str() && owners[0]["controller"] == true
    };
    let pods = ns
        .wait_pods("web", "adopted", |pods| pods.iter().all(is_adopted))
        .await;
    assert_eq!(uids_by_name(&pods), uids_by_name(before.values()));
    let status = ns
        .wait_status("web", "three available", |s| s.available_replicas == 3)
        .await;
    assert_eq!((status.replicas, status.updated_replicas), (3, 0));
    for pod in &pods {
        let name = name(pod);
        assert_eq!(
            container_status(pod, "app"),
            container_status(&before[&name], "app"),
            "nothing was restarted"
        );
    }
}

#[tokio::test]
async fn deployment_pods_are_adopted_then_replaced() {
    let ns = shared_cluster().await;
    let deployment = json!({
        "metadata": { "name": "web" },
        "spec": { "replicas": 3, "selector": { "matchLabels": { "app": "web" } }, "template": template("web") },
    });
    ns.create(&ns.api("apps", "v1", "Deployment"), deployment).await;
    let are_ready =
        |pods: &[&Value]| pods.len() == 3 && pods.iter().all(|pod| condition_is_true(pod, "Ready"));
    ns.wait_pods("web", "all ready", are_ready).await;
    let before = ns.pods_of("web").await;
    let monitor = ns.monitor_pods("web").await;

    ns.kubectl(&["delete", "deployment", "web", "--cascade=orphan"]);
    ns.kubectl(&["delete", "replicaset", "--selector=app=web", "--cascade=orphan"]);
    adopt_with_paused_set(&ns, &before).await;
    assert_eq!(monitor.observed().min_serving, 3);

    ns.patch_set(
        "web",
        json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": null } } } }),
    )
    .await;
    ns.wait_settled("web").await;
    let pods = ns
        .wait_pods("web", "the first ones are gone", |pods| pods.len() == 3)
        .await;
    let replacements = uids_by_name(&pods);
    assert!(
        before.keys().all(|name| !replacements.contains_key(name)),
        "{replacements:?}"
    );
    for pod in &pods {
        let gates = json!([{ "conditionType": "InPlaceUpdateReady" }, { "conditionType": "KruisePodReady" }]);
        assert_eq!(pod["spec"]["readinessGates"], gates);
    }
    // From now on they are updated in place.
    ns.set_image("web", "kruise-test/term:2").await;
    ns.wait_settled("web").await;
    let pods = ns.pods_of("web").await;
    assert_eq!(uids_by_name(pods.values()), replacements);
    assert!(
        pods.values().all(|pod| runs_image(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    let observed = monitor.observed();
    assert!(
        observed.min_serving >= 2 && observed.max_pods <= 3,
        "{observed:#?}"
    );
    assert_eq!(observed.all_uids.len(), 6, "{observed:#?}");
}

#[tokio::test]
async fn orphaned_pods_and_revisions_are_adopted() {
    let ns = shared_cluster().await;
    let revisions = ns.api("apps", "v1", "ControllerRevision");
    let spec = json!({ "replicas": 2 });
    ns.create_set("web", spec.clone()).await;
    ns.wait_settled("web").await;
    ns.set_image("web", "kruise-test/term:2").await;
    let first = ns.wait_settled("web").await;
    let before = ns.pods_of("web").await;
    ns.kubectl(&["delete", "clone", "web", "--cascade=orphan"]);
    let is_orphan = |object: &Value| object["metadata"]["ownerReferences"].is_null();
    ns.wait_pods("web", "orphans", |pods| pods.iter().all(|pod| is_orphan(pod)))
        .await;

    let mut spec = spec;
    spec["template"] = template("web");
    spec["template"]["spec"]["containers"][0]["image"] = json!("kruise-test/term:2");
    let created = ns.create_set("web", spec).await;
    let readopted = ns.wait_settled("web").await;
    assert_eq!(readopted.update_revision, first.update_revision);
    let pods = ns.pods_of("web").await;
    for (name, pod) in &pods {
        assert_eq!(
            container_status(pod, "app"),
            container_status(&before[name], "app"),
            "nothing was restarted"
        );
    }
    let all = revisions.list(&Default::default()).await.unwrap().items;
    assert_eq!(all.len(), 2);
    let uid = created.metadata.uid.unwrap();
    for revision in &all {
        let revision = json!(revision);
        assert_eq!(
            revision["metadata"]["ownerReferences"][0]["uid"],
            uid.as_str(),
            "{revision}"
        );
    }
    ns.kubectl(&["delete", "clone", "web"]);
    ns.poll_until("the revisions to go with their CloneSet", || async {
        let remaining = revisions.list(&Default::default()).await.unwrap();
        remaining.items.is_empty().then_some(())
    })
    .await;
}

/// A Pod's data is available again, and surplus Pods are deleted with their data.
#[tokio::test]
async fn orphaned_claims_are_adopted_with_their_pods() {
    let ns = shared_cluster().await;
    let spec = spec_with_claims(2, json!({ "maxUnavailable": 1 }), true);
    ns.create_set("web", spec.clone()).await;
    let before = wait_pods_and_claims(&ns, 2).await;
    let pods = ns.pod_uids("web").await;
    ns.kubectl(&["delete", "clone", "web", "--cascade=orphan"]);
    let claims = ns.claims().list(&Default::default()).await.unwrap().items;
    assert!(
        claims
            .iter()
            .all(|claim| claim.metadata.owner_references.is_none()),
        "{claims:#?}"
    );

    let created = ns.create_set("web", spec).await;
    assert_eq!(wait_pods_and_claims(&ns, 2).await, before);
    assert_eq!(ns.pod_uids("web").await, pods);
    let uid = created.metadata.uid.unwrap();
    let claims_owned = || async {
        let claims = ns.claims().list(&Default::default()).await.unwrap().items;
        let is_owned = |claim: &Value| claim["metadata"]["ownerReferences"][0]["uid"] == uid.as_str();
        claims.iter().all(|claim| is_owned(&json!(claim))).then_some(())
    };
    ns.poll_until("the claims to be the CloneSet's", claims_owned)
        .await;
    let victim = pods.keys().next().unwrap();
    ns.kubectl(&["delete", "pod", victim]);
    assert_eq!(
        wait_pods_and_claims(&ns, 2).await,
        before,
        "the next one has its volume"
    );
    ns.patch_set("web", json!({ "spec": { "replicas": 1 } })).await;
    wait_pods_and_claims(&ns, 1).await;
}

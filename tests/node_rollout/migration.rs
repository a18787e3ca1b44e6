//! From a Deployment to a CloneSet, as `docs/user/cloneset.md` says, while its Pods serve.

use std::collections::BTreeMap;
use std::ops::Deref;

use serde_json::{Value, json};

use crate::pods::{container, identities, is, name, runs};
use crate::volumes::{at_rest, with_claims};
use crate::workloads::{Bed, Space, shared, template};

/// Makes a paused CloneSet that takes these Pods over as they are.
async fn adopts(space: &Space<impl Deref<Target = Bed>>, before: &BTreeMap<String, Value>) {
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1, "paused": true });
    let set = json!({ "replicas": 3, "updateStrategy": { "rollingUpdate": rolling } });
    let made = space.set("web", set).await;
    let uid = made.metadata.uid.unwrap();
    let adopted = |pod: &&Value| {
        let owners = pod["metadata"]["ownerReferences"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        owners.len() == 1 && owners[0]["uid"] == uid.as_str() && owners[0]["controller"] == true
    };
    let pods = space
        .until_pods("web", "adopted", |pods| pods.iter().all(adopted))
        .await;
    assert_eq!(identities(&pods), identities(before.values()));
    let status = space
        .status("web", "three available", |s| s.available_replicas == 3)
        .await;
    assert_eq!((status.replicas, status.updated_replicas), (3, 0));
    for pod in &pods {
        let name = name(pod);
        assert_eq!(
            container(pod, "app"),
            container(&before[&name], "app"),
            "nothing was restarted"
        );
    }
}

#[tokio::test]
async fn the_pods_of_a_deployment_become_those_of_a_cloneset_and_are_replaced_when_told() {
    let space = shared().await;
    let deployment = json!({
        "metadata": { "name": "web" },
        "spec": { "replicas": 3, "selector": { "matchLabels": { "app": "web" } }, "template": template("web") },
    });
    space
        .create(&space.api("apps", "v1", "Deployment"), deployment)
        .await;
    let all_ready = |pods: &[&Value]| pods.len() == 3 && pods.iter().all(|pod| is(pod, "Ready"));
    space.until_pods("web", "all ready", all_ready).await;
    let before = space.pods_of("web").await;
    let witness = space.witness("web").await;

    space.kubectl(&["delete", "deployment", "web", "--cascade=orphan"]);
    space.kubectl(&["delete", "replicaset", "--selector=app=web", "--cascade=orphan"]);
    adopts(&space, &before).await;
    assert_eq!(witness.seen().least_serving, 3);

    space
        .edit(
            "web",
            json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": null } } } }),
        )
        .await;
    space.settled("web").await;
    let pods = space
        .until_pods("web", "the first ones are gone", |pods| pods.len() == 3)
        .await;
    let own = identities(&pods);
    assert!(before.keys().all(|name| !own.contains_key(name)), "{own:?}");
    for pod in &pods {
        let gates = json!([{ "conditionType": "InPlaceUpdateReady" }, { "conditionType": "KruisePodReady" }]);
        assert_eq!(pod["spec"]["readinessGates"], gates);
    }
    // From now on they are updated where they are.
    space.image("web", "kruise-test/term:2").await;
    space.settled("web").await;
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), own);
    assert!(
        pods.values().all(|pod| runs(pod, "kruise-test/term:2")),
        "{pods:#?}"
    );
    let seen = witness.seen();
    assert!(seen.least_serving >= 2 && seen.most <= 3, "{seen:#?}");
    assert_eq!(seen.ever.len(), 6, "{seen:#?}");
}

#[tokio::test]
async fn what_a_cloneset_leaves_behind_is_the_next_ones_and_goes_with_it() {
    let space = shared().await;
    let revisions = space.api("apps", "v1", "ControllerRevision");
    let spec = json!({ "replicas": 2 });
    space.set("web", spec.clone()).await;
    space.settled("web").await;
    space.image("web", "kruise-test/term:2").await;
    let first = space.settled("web").await;
    let before = space.pods_of("web").await;
    space.kubectl(&["delete", "clone", "web", "--cascade=orphan"]);
    let orphan = |object: &Value| object["metadata"]["ownerReferences"].is_null();
    space
        .until_pods("web", "orphans", |pods| pods.iter().all(|pod| orphan(pod)))
        .await;

    let mut spec = spec;
    spec["template"] = template("web");
    spec["template"]["spec"]["containers"][0]["image"] = json!("kruise-test/term:2");
    let made = space.set("web", spec).await;
    let again = space.settled("web").await;
    assert_eq!(again.update_revision, first.update_revision);
    let pods = space.pods_of("web").await;
    for (name, pod) in &pods {
        assert_eq!(
            container(pod, "app"),
            container(&before[name], "app"),
            "nothing was restarted"
        );
    }
    let all = revisions.list(&Default::default()).await.unwrap().items;
    assert_eq!(all.len(), 2);
    let uid = made.metadata.uid.unwrap();
    for revision in &all {
        let revision = json!(revision);
        assert_eq!(
            revision["metadata"]["ownerReferences"][0]["uid"],
            uid.as_str(),
            "{revision}"
        );
    }
    space.kubectl(&["delete", "clone", "web"]);
    space
        .until("the revisions to go with their CloneSet", || async {
            let left = revisions.list(&Default::default()).await.unwrap();
            left.items.is_empty().then_some(())
        })
        .await;
}

/// What a Pod wrote is there again, and what is too many goes with its data.
#[tokio::test]
async fn claims_that_a_cloneset_leaves_behind_are_adopted_with_their_pods() {
    let space = shared().await;
    let spec = with_claims(2, json!({ "maxUnavailable": 1 }), true);
    space.set("web", spec.clone()).await;
    let before = at_rest(&space, 2).await;
    let pods = space.identities("web").await;
    space.kubectl(&["delete", "clone", "web", "--cascade=orphan"]);
    let claims = space.claims().list(&Default::default()).await.unwrap().items;
    assert!(
        claims
            .iter()
            .all(|claim| claim.metadata.owner_references.is_none()),
        "{claims:#?}"
    );

    let made = space.set("web", spec).await;
    assert_eq!(at_rest(&space, 2).await, before);
    assert_eq!(space.identities("web").await, pods);
    let uid = made.metadata.uid.unwrap();
    let owned = || async {
        let claims = space.claims().list(&Default::default()).await.unwrap().items;
        let ours = |claim: &Value| claim["metadata"]["ownerReferences"][0]["uid"] == uid.as_str();
        claims.iter().all(|claim| ours(&json!(claim))).then_some(())
    };
    space.until("the claims to be the CloneSet's", owned).await;
    let victim = pods.keys().next().unwrap();
    space.kubectl(&["delete", "pod", victim]);
    assert_eq!(at_rest(&space, 2).await, before, "the next one has its volume");
    space.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    at_rest(&space, 1).await;
}

//! Sets, namespaces and Pods that change what a set is for, in the middle of a rollout.

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::fixture::{names, shared_cluster};
use crate::namespace::{SIDECAR, SidecarNamespace, has_sidecar};
use crate::pods::uids_by_name;
use support::untyped::untyped;

/// Pods whose spec has this image of the sidecar.
fn with_image<'a>(pods: &'a [Value], image: &str) -> Vec<&'a str> {
    let found = pods.iter().filter(|pod| has_sidecar(pod, image));
    found
        .map(|pod| pod["metadata"]["name"].as_str().unwrap())
        .collect()
}

/// Starts a rollout that stops at its first Pod, because no kubelet runs; returns the Pod's name.
async fn stop_in_the_middle(test: &SidecarNamespace, image: &'static str) -> String {
    test.stop_kubelet();
    test.set_image(image).await;
    let one_updated = |pods: &[&Value]| pods.iter().any(|pod| has_sidecar(pod, image));
    test.wait_pods(&test.namespace, "the first Pod is updated", one_updated)
        .await;
    test.wait_waiting("MaxUnavailable", "").await;
    let all = test.pods_of(&test.namespace).await;
    let updated = with_image(&all, image);
    assert_eq!(updated.len(), 1, "one Pod may be unavailable: {updated:?}");
    updated[0].to_owned()
}

#[tokio::test]
async fn deleted_set_leaves_its_pods_and_a_new_one_continues() {
    let shared = shared_cluster().await;
    let mut test = SidecarNamespace::new(&shared.cluster.plane, "deleted").await;
    let first = test.create_set(json!({})).await;
    let pods = test.create_pods(4).await;
    let uids = uids_by_name(&test.pods_of("deleted").await);
    let updated = stop_in_the_middle(&test, "side:2").await;
    test.sidecar_sets()
        .delete("deleted", &Default::default())
        .await
        .unwrap();
    test.restart_kubelet();
    test.wait_sidecars("side:2", std::slice::from_ref(&updated)).await;
    test.wait_injected(|pod| names(pod) == ["app"]).await;

    // While another set is updated, there is time for writes to these Pods.
    let other = SidecarNamespace::new(&shared.cluster.plane, "deleted-clock").await;
    other.create_set(json!({})).await;
    let others = other.create_pods(2).await;
    other.set_image("side:2").await;
    other.wait_sidecars("side:2", &others).await;
    let updates: usize = pods.iter().map(|pod| test.updates(pod)).sum();
    assert_eq!(updates, 1, "the Pod that was updated before");
    let left = test.pods_of("deleted").await;
    assert_eq!(with_image(&left, "side:1").len(), 3);
    assert_eq!(uids_by_name(&left), uids);

    // A set of this name takes over what the Pods record. Their updated Pod is up to date.
    let set = test
        .create_set(json!({ "containers": [{ "name": SIDECAR, "image": "side:2" }] }))
        .await;
    assert_ne!(set["metadata"]["uid"], first["metadata"]["uid"]);
    test.wait_sidecars("side:2", &pods).await;
    test.wait_counts([4, 4, 4, 0]).await;
    for pod in &pods {
        assert_eq!(test.updates(pod), 1, "{pod}");
    }
    assert_eq!(uids_by_name(&test.pods_of("deleted").await), uids);
}

#[tokio::test]
async fn relabelled_namespace_leaves_the_set_and_comes_back() {
    let shared = shared_cluster().await;
    let test = SidecarNamespace::new(&shared.cluster.plane, "relabelled").await;
    let namespaces: Api<DynamicObject> = untyped(&test.admin, "", "v1", "Namespace", None);
    let set_env = async |env: &str| {
        let patch = Patch::Merge(json!({ "metadata": { "labels": { "env": env } } }));
        let params = PatchParams::default();
        namespaces.patch("relabelled", &params, &patch).await.unwrap();
    };
    set_env("prod").await;
    let selector = json!({ "matchLabels": { "kubernetes.io/metadata.name": null, "env": "prod" } });
    test.create_set(json!({ "namespaceSelector": selector })).await;
    let pods = test.create_pods(3).await;
    test.wait_counts([3, 3, 3, 0]).await;

    set_env("test").await;
    test.wait_counts([0, 0, 0, 0]).await;
    test.wait_injected(|pod| names(pod) == ["app"]).await;
    test.create_pod("late").await;
    test.set_image("side:2").await;
    test.wait_counts([0, 0, 0, 0]).await;
    assert_eq!(with_image(&test.pods_of("relabelled").await, "side:2"), [""; 0]);

    set_env("prod").await;
    test.wait_sidecars("side:2", &pods).await;
    test.wait_counts([3, 3, 3, 1]).await;
    let late = test.pods().get("late").await.unwrap();
    assert_eq!(names(&json!(late)), ["app"], "existing Pods do not change");
    for pod in &pods {
        assert_eq!(test.updates(pod), 1, "{pod}");
    }
    test.wait_injected(|pod| names(pod) == [SIDECAR, "app"]).await;
}

#[tokio::test]
async fn relabelled_pod_leaves_the_rollout_and_comes_back() {
    let shared = shared_cluster().await;
    let mut test = SidecarNamespace::new(&shared.cluster.plane, "moving-pod").await;
    test.create_set(json!({})).await;
    let pods = test.create_pods(4).await;
    let unavailable = stop_in_the_middle(&test, "side:2").await;
    let outdated = pods.iter().find(|pod| **pod != unavailable).unwrap();

    // Neither counts any more, so another Pod may be unavailable.
    for pod in [&unavailable, outdated] {
        test.set_labels(pod, json!({ "app": "other" })).await;
    }
    let one_updated = |pods: &[&Value]| pods.iter().any(|pod| has_sidecar(pod, "side:2"));
    test.wait_pods("moving-pod", "the next Pod is updated", one_updated)
        .await;
    test.wait_counts([2, 1, 1, 0]).await;
    test.restart_kubelet();
    test.wait_counts([2, 2, 2, 0]).await;
    let outside = test.pods_of("other").await;
    assert_eq!(with_image(&outside, "side:1"), [outdated.as_str()]);

    for pod in [&unavailable, outdated] {
        test.set_labels(pod, json!({ "app": "moving-pod" })).await;
    }
    test.wait_sidecars("side:2", &pods).await;
    test.wait_counts([4, 4, 4, 0]).await;
    for pod in &pods {
        assert_eq!(test.updates(pod), 1, "{pod}");
    }
}

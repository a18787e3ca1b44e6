//! Invariants of Pods and claims once nothing is left to do.

use serde_json::Value;

use super::convergence::Goal;
use super::fake_cluster::{BACKUP, FakeCluster, has_owner};
use super::fake_node::expected_env;
use crate::cloneset::plan::Observed;
use kruise_api::keys;
use kruise_workload::in_place::{Container, Pod, resize};
use kruise_workload::pods;

/// Our Pods are complete, and no unknown field was lost.
pub(super) fn assert_pods_complete(cluster: &FakeCluster, goal: Goal) {
    let made = |pod: &&Value| {
        let ours = pod["metadata"]["ownerReferences"][0]["uid"] == "set";
        let ended = ["Failed", "Succeeded"].contains(&pod["status"]["phase"].as_str().unwrap_or_default());
        ours && !ended && pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID].is_string()
    };
    let claims = cluster.set["spec"]["volumeClaimTemplates"].as_array().unwrap();
    for pod in cluster.pods.values().filter(made) {
        assert_eq!(
            pod["spec"]["ofOthers"], pod["metadata"]["uid"],
            "a field was lost"
        );
        let state = &pod["metadata"]["labels"][keys::LIFECYCLE_STATE];
        let waits = goal == Goal::Paused && state == "PreparingUpdate";
        assert!(waits || state == "Normal", "{state}");
        assert_matches_revision(cluster, pod);
        if !claims.is_empty() {
            let claim = &pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"];
            let claim = &cluster.claims[claim.as_str().unwrap()];
            let owners = claim["metadata"]["ownerReferences"].as_array().unwrap();
            // A claim that another owner had when its Pod was adopted remains theirs, even if they no longer control
            // it.
            let goes_with_it = owners.iter().any(|o| o["uid"] == pod["metadata"]["uid"]);
            let another_s = owners
                .iter()
                .any(|o| o["uid"] == BACKUP && (o["controller"] == true || !goes_with_it));
            assert!(
                has_owner(claim, "set") || another_s,
                "a claim would be deleted with its Pod, even if another client deletes the Pod"
            );
        }
    }
}

/// The Pod and the environment of its containers match the template of its revision, whatever happened before.
fn assert_matches_revision(cluster: &FakeCluster, pod: &Value) {
    let observed = Pod::from_json(pod);
    let revision = cluster
        .revisions
        .iter()
        .find(|r| pods::has_revision(&observed, &r.name))
        .unwrap();
    let template = &revision.data["spec"]["template"];
    assert!(!resize::has_resize_annotation(&observed), "{pod:#}");
    for (part, key) in [("labels", "l"), ("annotations", "n")] {
        let (actual, expected) = (&pod["metadata"][part][key], &template["metadata"][part][key]);
        assert_eq!(actual, expected, "{part} {key} of {pod:#}");
    }
    let containers = pod["spec"]["containers"].as_array().unwrap();
    let expected_containers = template["spec"]["containers"].as_array().unwrap();
    assert_eq!(containers.len(), expected_containers.len());
    for ((container, asked), status) in containers
        .iter()
        .zip(expected_containers)
        .zip(&observed.container_statuses)
    {
        let (actual, expected) = (Container::from_json(container), Container::from_json(asked));
        assert_eq!(actual.image, expected.image, "{pod:#}");
        assert_eq!(actual.resources, expected.resources, "{pod:#}");
        assert_eq!(status.image, actual.image, "running image of {pod:#}");
        assert_eq!(
            status.resources.clone().unwrap_or_default(),
            actual.resources,
            "{pod:#}"
        );
    }
    let statuses = pod["status"]["containerStatuses"].as_array().unwrap();
    for (container, status) in containers.iter().zip(statuses) {
        // Without the feature, a label changes no container.
        let env_is_current =
            !cluster.features.env_from_metadata || status["env"] == expected_env(container, &observed);
        assert!(env_is_current, "outdated environment: {pod:#}");
    }
}

/// Every claim belongs to a Pod that the CloneSet did not delete, unless claims are kept for reuse. Shared claims end
/// up with their other owner only.
pub(super) fn assert_no_leftover_claims(cluster: &FakeCluster, observed: &Observed) {
    let shared = cluster.claims.values().filter(|claim| claim["shared"] == true);
    for claim in shared {
        assert!(has_owner(claim, BACKUP), "lost its other owner: {claim}");
    }
    let owners = |claim: &Value| claim["metadata"]["ownerReferences"].as_array().cloned();
    let theirs = |claim: &Value| owners(claim).unwrap().iter().all(|owner| owner["uid"] == BACKUP);
    let ours: Vec<&Value> = cluster.claims.values().filter(|claim| !theirs(claim)).collect();
    for claim in &ours {
        let id = &claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID];
        let id = id.as_str().unwrap();
        assert!(
            !cluster.deleted_ids.contains(id),
            "claim of a deleted Pod still exists: {claim}"
        );
    }
    let strategy = observed.set.spec.scale_strategy.as_ref();
    if strategy.is_some_and(|s| s.enable_pvc_reuse) {
        return;
    }
    for claim in ours {
        let id = claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]
            .as_str()
            .unwrap();
        assert!(
            cluster.pods.contains_key(&format!("s-{id}")),
            "no Pod uses {claim}"
        );
    }
}

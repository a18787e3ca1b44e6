//! What Pods and claims are like when nothing is left to be done.

use serde_json::Value;

use super::convergence::Goal;
use super::fake_cluster::{BACKUP, FakeCluster, has_owner};
use super::fake_node::expected_env;
use crate::cloneset::plan::Observed;
use kruise_api::keys;
use kruise_workload::in_place::{Container, Pod, resize};
use kruise_workload::pods;

/// Pods that we made have all that they are to have, and nothing was lost that we do not know.
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
            // One that was somebody else's when its Pod was adopted stays theirs, also where they control it no more.
            let goes_with_it = owners.iter().any(|o| o["uid"] == pod["metadata"]["uid"]);
            let another_s = owners
                .iter()
                .any(|o| o["uid"] == BACKUP && (o["controller"] == true || !goes_with_it));
            assert!(
                has_owner(claim, "set") || another_s,
                "a claim would go with its Pod, whoever deletes that"
            );
        }
    }
}

/// Whatever came over the Pod: it is, and its containers were started, as the template of its revision says.
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
        assert_eq!(status.image, actual.image, "what runs in {pod:#}");
        assert_eq!(
            status.resources.clone().unwrap_or_default(),
            actual.resources,
            "{pod:#}"
        );
    }
    let statuses = pod["status"]["containerStatuses"].as_array().unwrap();
    for (container, status) in containers.iter().zip(statuses) {
        // Without the feature, what is in a label changes no container.
        let env_is_current =
            !cluster.features.env_from_metadata || status["env"] == expected_env(container, &observed);
        assert!(env_is_current, "the environment is of old: {pod:#}");
    }
}

/// Every claim is a Pod's, unless claims are kept for later ones: of Pods that the CloneSet did not delete. Those that
/// are somebody else's, too, are that one's alone in the end.
pub(super) fn assert_no_leftover_claims(cluster: &FakeCluster, observed: &Observed) {
    let shared = cluster.claims.values().filter(|claim| claim["shared"] == true);
    for claim in shared {
        assert!(
            has_owner(claim, BACKUP),
            "another's claim was taken away: {claim}"
        );
    }
    let owners = |claim: &Value| claim["metadata"]["ownerReferences"].as_array().cloned();
    let theirs = |claim: &Value| owners(claim).unwrap().iter().all(|owner| owner["uid"] == BACKUP);
    let ours: Vec<&Value> = cluster.claims.values().filter(|claim| !theirs(claim)).collect();
    for claim in &ours {
        let id = &claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID];
        let id = id.as_str().unwrap();
        assert!(
            !cluster.deleted_ids.contains(id),
            "its Pod was deleted, and it was not: {claim}"
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
            "nobody has {claim}"
        );
    }
}

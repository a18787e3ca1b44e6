//! ControllerRevisions: the oldest are deleted, those in use are kept, and taken names are not reused.

use std::collections::BTreeMap;
use std::time::Instant;

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};

use crate::fixture::{Fixture, identities};
use crate::pods::revision;
use crate::test_cluster::{WAIT_TIMEOUT, shared_cluster};

const IMAGES: [&str; 5] = [
    "example.com/app:1",
    "example.com/app:2",
    "example.com/app:3",
    "example.com/app:4",
    "example.com/app:5",
];

fn update_revision(set: &CloneSet) -> String {
    set.status.as_ref().unwrap().update_revision.clone()
}

/// Number of each revision, by name.
async fn revision_numbers(fixture: &Fixture) -> BTreeMap<String, i64> {
    let all = fixture.api("apps", "v1", "ControllerRevision");
    let all = all.list(&Default::default()).await.unwrap().items.into_iter();
    all.map(|second_revision_used| {
        (
            second_revision_used.metadata.name.unwrap(),
            second_revision_used.data["revision"].as_i64().unwrap(),
        )
    })
    .collect()
}

/// Changes the image, and returns the revision that the manager creates for it.
async fn roll_out_image(fixture: &Fixture, image: &str) -> String {
    let before = update_revision(&fixture.sets().get("web").await.unwrap());
    fixture.set_image("web", image).await;
    let has_new_revision = |set: &CloneSet| update_revision(set) != before;
    update_revision(
        &fixture
            .wait_status("web", "another revision", has_new_revision)
            .await,
    )
}

#[tokio::test]
async fn revision_history_limit_keeps_revisions_in_use() {
    let fixture = Fixture::new(shared_cluster(), "trimmed").await;
    let spec = json!({ "replicas": 2, "revisionHistoryLimit": 1, "updateStrategy": { "type": "OnDelete" } });
    fixture.create_cloneset("web", spec).await;
    let mut names = vec![update_revision(&fixture.wait_settled("web").await)];
    for (index, image) in IMAGES.iter().enumerate().skip(1) {
        names.push(roll_out_image(&fixture, image).await);
        if index == 1 {
            // One Pod keeps the second revision, which is then neither the oldest nor the newest.
            let first = fixture.pods_of("web").await.remove(0);
            let first = first["metadata"]["name"].as_str().unwrap().to_owned();
            fixture.pods().delete(&first, &Default::default()).await.unwrap();
            let second_revision_used = |set: &CloneSet| {
                let status = set.status.as_ref().unwrap();
                (status.updated_replicas, status.available_replicas) == (1, 2)
            };
            fixture
                .wait_status("web", "one of the second revision", second_revision_used)
                .await;
        }
    }
    let expected = [0, 1, 3, 4].map(|index| (names[index].clone(), i64::try_from(index).unwrap() + 1));
    let expected = BTreeMap::from(expected);
    let trimmed = || async { (revision_numbers(&fixture).await == expected).then_some(()) };
    fixture
        .poll_until("the third revision is deleted, and no other", trimmed)
        .await;
    let pods = fixture.pods_of("web").await;
    let mut used: Vec<String> = pods.iter().map(revision).collect();
    used.sort_by_key(|name| names.iter().position(|n| n == name));
    assert_eq!(used, names[..2]);
}

/// The oldest supported release drops image volumes and their mounts, from templates as well as from Pods.
#[tokio::test]
async fn reapplied_image_volume_template_keeps_one_revision() {
    let fixture = Fixture::new(shared_cluster(), "image-volume").await;
    let mount = |volume: &str| json!({ "name": volume, "mountPath": format!("/{volume}") });
    let mounts = ["model", "config", "data"].map(mount);
    let container = json!({ "name": "app", "image": IMAGES[0], "volumeMounts": mounts });
    let volumes = json!([
        { "name": "model", "image": { "reference": "example.com/model:1" } },
        { "name": "config", "configMap": { "name": "config" } },
    ]);
    let claim = json!({ "metadata": { "name": "data" }, "spec": { "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": "1024Mi" } } } });
    let spec = json!({ "template": { "spec": { "containers": [container], "volumes": volumes } },
        "volumeClaimTemplates": [claim] });
    let set = fixture.create_cloneset("web", spec.clone()).await;
    fixture.wait_settled("web").await;
    let pods = identities(&fixture.pods_of("web").await);
    let again = fixture.patch_set("web", json!({ "spec": spec })).await;
    assert_eq!(again.metadata.generation, set.metadata.generation);

    fixture.set_image("web", IMAGES[1]).await;
    fixture.wait_settled("web").await;
    assert_eq!(
        identities(&fixture.pods_of("web").await),
        pods,
        "updated in place"
    );
    let again = fixture.set_image("web", IMAGES[0]).await;
    fixture.wait_settled("web").await;
    assert_eq!(again.spec.template, set.spec.template);
    assert_eq!(identities(&fixture.pods_of("web").await), pods);
    assert_eq!(revision_numbers(&fixture).await.len(), 2);
}

/// Replaces a revision by one with the same name and different data.
async fn replace_revision(fixture: &Fixture, name: &str, owner: &Value) {
    let all = fixture.api("apps", "v1", "ControllerRevision");
    all.delete(name, &Default::default()).await.unwrap();
    let other = json!({
        "metadata": { "name": name, "labels": { "app": "web" }, "ownerReferences": [owner] },
        "revision": 1,
        "data": { "spec": { "template": { "$patch": "replace", "spec": { "containers": [] } } } },
    });
    fixture.create(&all, other).await;
}

/// Sets the image whose revision name has foreign data. Until the manager observes that, it takes the revision for its
/// own.
async fn wait_for_collision(fixture: &Fixture, name: &str) -> CloneSet {
    let started = Instant::now();
    loop {
        fixture.set_image("web", IMAGES[1]).await;
        let set = fixture.wait_settled("web").await;
        if set.status.as_ref().is_some_and(|s| s.update_revision != name) {
            return set;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT, "{name} is still used: {set:?}");
        roll_out_image(fixture, IMAGES[0]).await;
        fixture.wait_settled("web").await;
    }
}

#[tokio::test]
async fn revision_name_collision_is_counted_and_avoided() {
    for (namespace, same_owner) in [("collides-with-ours", true), ("collides-with-others", false)] {
        let fixture = Fixture::new(shared_cluster(), namespace).await;
        let set = fixture.create_cloneset("web", json!({ "replicas": 1 })).await;
        fixture.wait_settled("web").await;
        let name = roll_out_image(&fixture, IMAGES[1]).await;
        fixture.wait_settled("web").await;
        roll_out_image(&fixture, IMAGES[0]).await;
        fixture.wait_settled("web").await;
        let uid = set.metadata.uid.unwrap();
        let uid = if same_owner {
            uid.as_str()
        } else {
            "00000000-0000-0000-0000-000000000000"
        };
        let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web",
            "uid": uid, "controller": true });
        replace_revision(&fixture, &name, &owner).await;

        let set = wait_for_collision(&fixture, &name).await;
        let status = set.status.as_ref().unwrap();
        assert_eq!(status.collision_count, Some(1));
        assert!(
            revision_numbers(&fixture).await.contains_key(&name),
            "it is another's"
        );
        assert_eq!(revision(&fixture.pods_of("web").await[0]), status.update_revision);
        // The collision count is part of all later names.
        roll_out_image(&fixture, IMAGES[2]).await;
        let set = fixture.wait_settled("web").await;
        assert_eq!(set.status.unwrap().collision_count, Some(1));
    }
}

//! ControllerRevisions: the oldest go, those in use stay, and names that are taken are not used.

use std::collections::BTreeMap;
use std::time::Instant;

use kruise_api::cloneset::CloneSet;
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::pods::revision;
use crate::world::{PATIENCE, world};

const IMAGES: [&str; 5] = [
    "example.com/app:1",
    "example.com/app:2",
    "example.com/app:3",
    "example.com/app:4",
    "example.com/app:5",
];

fn update(set: &CloneSet) -> String {
    set.status.as_ref().unwrap().update_revision.clone()
}

/// Number of each revision, by name.
async fn revisions(field: &Field) -> BTreeMap<String, i64> {
    let all = field.api("apps", "v1", "ControllerRevision");
    let all = all.list(&Default::default()).await.unwrap().items.into_iter();
    all.map(|one| (one.metadata.name.unwrap(), one.data["revision"].as_i64().unwrap()))
        .collect()
}

/// Another image, and the revision that the manager makes of it.
async fn next(field: &Field, image: &str) -> String {
    let before = update(&field.sets().get("web").await.unwrap());
    field.image("web", image).await;
    let another = |set: &CloneSet| update(set) != before;
    update(&field.status("web", "another revision", another).await)
}

#[tokio::test]
async fn old_revisions_are_deleted_but_for_those_in_use() {
    let field = Field::new(world(), "trimmed").await;
    let spec = json!({ "replicas": 2, "revisionHistoryLimit": 1, "updateStrategy": { "type": "OnDelete" } });
    field.set("web", spec).await;
    let mut names = vec![update(&field.settled("web").await)];
    for (at, image) in IMAGES.iter().enumerate().skip(1) {
        names.push(next(&field, image).await);
        if at == 1 {
            // One Pod keeps the second revision, which is neither the first of all nor the newest then.
            let first = field.pods_of("web").await.remove(0);
            let first = first["metadata"]["name"].as_str().unwrap().to_owned();
            field.pods().delete(&first, &Default::default()).await.unwrap();
            let one = |set: &CloneSet| {
                let status = set.status.as_ref().unwrap();
                (status.updated_replicas, status.available_replicas) == (1, 2)
            };
            field.status("web", "one of the second revision", one).await;
        }
    }
    let kept = [0, 1, 3, 4].map(|at| (names[at].clone(), i64::try_from(at).unwrap() + 1));
    let kept = BTreeMap::from(kept);
    let trimmed = || async { (revisions(&field).await == kept).then_some(()) };
    field
        .until("the third revision is deleted, and no other", trimmed)
        .await;
    let pods = field.pods_of("web").await;
    let mut used: Vec<String> = pods.iter().map(revision).collect();
    used.sort_by_key(|name| names.iter().position(|n| n == name));
    assert_eq!(used, names[..2]);
}

/// The oldest release that is supported drops image volumes and their mounts, of templates as well as of Pods.
#[tokio::test]
async fn a_template_with_an_image_volume_has_one_revision_however_often_it_is_applied() {
    let field = Field::new(world(), "image-volume").await;
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
    let set = field.set("web", spec.clone()).await;
    field.settled("web").await;
    let pods = identities(&field.pods_of("web").await);
    let again = field.edit("web", json!({ "spec": spec })).await;
    assert_eq!(again.metadata.generation, set.metadata.generation);

    field.image("web", IMAGES[1]).await;
    field.settled("web").await;
    assert_eq!(identities(&field.pods_of("web").await), pods, "updated in place");
    let again = field.image("web", IMAGES[0]).await;
    field.settled("web").await;
    assert_eq!(again.spec.template, set.spec.template);
    assert_eq!(identities(&field.pods_of("web").await), pods);
    assert_eq!(revisions(&field).await.len(), 2);
}

/// A revision of that name and another's data, in the place of the one that there is.
async fn taken(field: &Field, name: &str, owner: &Value) {
    let all = field.api("apps", "v1", "ControllerRevision");
    all.delete(name, &Default::default()).await.unwrap();
    let other = json!({
        "metadata": { "name": name, "labels": { "app": "web" }, "ownerReferences": [owner] },
        "revision": 1,
        "data": { "spec": { "template": { "$patch": "replace", "spec": { "containers": [] } } } },
    });
    field.create(&all, other).await;
}

/// Gives it the image whose revision is another's. Until the manager has heard of that, it takes the name for its own.
async fn once_it_is_known(field: &Field, name: &str) -> CloneSet {
    let begun = Instant::now();
    loop {
        field.image("web", IMAGES[1]).await;
        let set = field.settled("web").await;
        if set.status.as_ref().is_some_and(|s| s.update_revision != name) {
            return set;
        }
        assert!(begun.elapsed() < PATIENCE, "{name} is still used: {set:?}");
        next(field, IMAGES[0]).await;
        field.settled("web").await;
    }
}

#[tokio::test]
async fn a_name_that_another_revision_has_is_counted_and_not_used() {
    for (namespace, ours) in [("collides-with-ours", true), ("collides-with-others", false)] {
        let field = Field::new(world(), namespace).await;
        let set = field.set("web", json!({ "replicas": 1 })).await;
        field.settled("web").await;
        let name = next(&field, IMAGES[1]).await;
        field.settled("web").await;
        next(&field, IMAGES[0]).await;
        field.settled("web").await;
        let uid = set.metadata.uid.unwrap();
        let uid = if ours {
            uid.as_str()
        } else {
            "00000000-0000-0000-0000-000000000000"
        };
        let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web",
            "uid": uid, "controller": true });
        taken(&field, &name, &owner).await;

        let set = once_it_is_known(&field, &name).await;
        let status = set.status.as_ref().unwrap();
        assert_eq!(status.collision_count, Some(1));
        assert!(revisions(&field).await.contains_key(&name), "it is another's");
        assert_eq!(revision(&field.pods_of("web").await[0]), status.update_revision);
        // The count goes into the names of all that follow.
        next(&field, IMAGES[2]).await;
        let set = field.settled("web").await;
        assert_eq!(set.status.unwrap().collision_count, Some(1));
    }
}

//! Executes the plan for one NodeImage.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Resource};
use serde_json::{Map, Value, json};

use super::plan::{Action, Removal, TagFailure};
use crate::Context;
use crate::view::{NodeImageView, progress_hash};
use kruise_api::image_reference::join_name_and_tag;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::node_image::{
    ImagePullPhase, ImageTagStatus, NodeImage, NodeImageSpec, NodeImageStatus, ReferenceObject,
};
use kruise_cluster::{Error, EventType, write};

/// Which of these secrets do not exist any more. One that cannot be read counts as existing.
pub async fn lookup_missing_secrets(ctx: &Context, image: &NodeImageView) -> HashSet<ReferenceObject> {
    let mut missing = HashSet::new();
    let secrets: HashSet<&ReferenceObject> =
        image.non_batch_secrets.iter().map(|(_, secret)| secret).collect();
    for secret in secrets {
        let api = Api::<Secret>::namespaced(ctx.cluster.client.clone(), &secret.namespace);
        match write::get(&api, &secret.name).await {
            Ok(None) => {
                missing.insert(secret.clone());
            }
            Ok(Some(_)) => {}
            Err(error) => {
                let ReferenceObject { namespace, name, .. } = secret;
                tracing::debug!(namespace, name, %error, "pull secret of a NodeImage cannot be looked up");
            }
        }
    }
    missing
}

/// Executes one action; a missing object counts as deleted.
pub async fn execute(
    ctx: &Context,
    name: &str,
    observed: Option<&NodeImageView>,
    action: Action,
    now: Timestamp,
) -> Result<(), Error> {
    let api = Api::<NodeImage>::all(ctx.cluster.client.clone());
    let result = match action {
        Action::Create { labels } => {
            let created = create(&api, name, labels).await;
            created.inspect(|()| tracing::info!(node = name, "NodeImage created"))
        }
        Action::Delete => {
            // The watch of Nodes may be behind that of NodeImages, and a deleted NodeImage cannot be restored.
            let nodes = Api::<Node>::all(ctx.cluster.client.clone());
            let node = write::get(&nodes, name).await?;
            if node.is_some_and(|n| n.metadata.deletion_timestamp.is_none()) {
                return Ok(());
            }
            let uid = observed.map_or("", |s| s.uid.as_str());
            let deleted = write::delete(&api, name, uid).await;
            deleted.inspect(|()| tracing::info!(node = name, "NodeImage deleted: its Node has gone"))
        }
        Action::SetLabels(labels) => {
            let body = json!({ "metadata": { "labels": labels } });
            let labelled = write::patch_merge(&api, name, &body).await;
            labelled.map(|_| tracing::info!(node = name, "NodeImage has the labels of its Node"))
        }
        Action::RemoveEntries(removal) => remove_entries(ctx, &api, name, &removal).await,
        Action::FailTags(failures) => fail_tags(ctx, &api, name, &failures, now).await,
    };
    match result {
        Err(error) if error.not_found() || error.already_exists() => Ok(()),
        other => other,
    }
}

async fn create(api: &Api<NodeImage>, name: &str, labels: BTreeMap<String, String>) -> Result<(), Error> {
    let mut object = NodeImage::new(name, NodeImageSpec::default());
    object.metadata.labels = Some(labels);
    write::create(api, &object).await.map(|_| ())
}

/// Removes tags of exactly the planned version that no further job owns, and images that are left without tags.
async fn remove_entries(
    ctx: &Context,
    api: &Api<NodeImage>,
    name: &str,
    removal: &Removal,
) -> Result<(), Error> {
    let Some(object) = write::get(api, name).await? else {
        return Ok(());
    };
    let mut unreadable = Vec::new();
    let mut images = Map::new();
    for (image, spec) in &object.spec.images {
        let mut remaining = spec.clone();
        remaining.tags.retain(|t| {
            let removed = removal.tags.iter().any(|planned| planned.applies_to(image, t));
            if let Some(why) = t.unreadable.as_deref().filter(|_| removed) {
                unreadable.push(format!(
                    "removed {}, which cannot be read: {why}",
                    join_name_and_tag(image, &t.tag)
                ));
            }
            !removed
        });
        for tag in &mut remaining.tags {
            let owner_deleted = |uid: &str| {
                let same = |(i, t, u): &(String, String, String)| i == image && *t == tag.tag && u == uid;
                removal.owners.iter().any(same)
            };
            tag.owner_references
                .retain(|owner| !owner.uid.as_deref().is_some_and(owner_deleted));
        }
        remaining.pull_secrets.retain(|s| {
            !removal
                .secrets
                .iter()
                .any(|(i, secret)| i == image && secret == s)
        });
        if remaining.tags.is_empty() {
            images.insert(image.clone(), Value::Null);
        } else if remaining != *spec {
            let mut entry = json!(remaining);
            if remaining.pull_secrets.is_empty() {
                set(&mut entry, &["pullSecrets"], Value::Null);
            }
            images.insert(image.clone(), entry);
        }
    }
    if images.is_empty() {
        return Ok(());
    }
    let body = json!({
        "metadata": { "resourceVersion": object.metadata.resource_version },
        "spec": { "images": images },
    });
    write::patch_merge(api, name, &body).await?;
    tracing::info!(
        node = name,
        tags = removal.tags.len(),
        "removed from the NodeImage what no job needs"
    );
    for note in unreadable {
        tracing::warn!(node = name, "NodeImage: {note}");
        let (reference, events) = (object.object_ref(&()), &ctx.cluster.events);
        events.publish(
            reference,
            EventType::Warning,
            keys::EVENT_UNREADABLE,
            "Remove",
            note,
        );
    }
    Ok(())
}

/// Marks tags as failed for a daemon that reports nothing.
async fn fail_tags(
    ctx: &Context,
    api: &Api<NodeImage>,
    name: &str,
    failures: &[TagFailure],
    now: Timestamp,
) -> Result<(), Error> {
    let Some(object) = write::get(api, name).await? else {
        return Ok(());
    };
    let mut status = object.status.clone().unwrap_or_default();
    let mut marked: Vec<(&TagFailure, Vec<ObjectReference>)> = Vec::new();
    for failure in failures {
        let spec = object.spec.images.get(&failure.image);
        let tag_spec = spec.and_then(|s| s.tags.iter().find(|t| t.tag == failure.tag));
        let Some(tag_spec) = tag_spec.filter(|t| t.version == failure.version) else {
            continue;
        };
        if mark_failed(&mut status, failure, now) {
            marked.push((failure, tag_spec.owner_references.clone()));
        }
    }
    if marked.is_empty() {
        return Ok(());
    }
    update_counters(&mut status, &object.spec);
    let mut body = json!({
        "metadata": { "resourceVersion": object.metadata.resource_version },
        "status": status,
    });
    set(&mut body, &["status", "progress"], json!(status.progress));
    write::patch_status_merge(api, name, &body).await?;
    for (failure, mut owners) in marked {
        owners.push(object.object_ref(&()));
        let image = join_name_and_tag(&failure.image, &failure.tag);
        tracing::info!(
            node = name,
            image,
            reason = failure.message,
            "marked the pull as failed: kruise-daemon does not respond"
        );
        let note = format!(
            "Failed to pull image {image} on node {name} for {}",
            failure.message
        );
        for owner in owners {
            ctx.cluster.events.publish(
                owner,
                EventType::Warning,
                keys::EVENT_PULL_FAILED,
                "GiveUp",
                note.clone(),
            );
        }
    }
    Ok(())
}

/// Marks one tag as failed, unless the daemon has reported progress in the meantime.
fn mark_failed(status: &mut NodeImageStatus, failure: &TagFailure, now: Timestamp) -> bool {
    let tags = &mut status
        .image_statuses
        .entry(failure.image.clone())
        .or_default()
        .tags;
    let failed = ImageTagStatus {
        tag: failure.tag.clone(),
        phase: ImagePullPhase::Failed,
        progress: 0,
        start_time: None,
        completion_time: Some(Time(now)),
        version: failure.version,
        image_id: None,
        message: Some(failure.message.to_owned()),
        bytes: None,
    };
    match tags.iter_mut().find(|t| t.tag == failure.tag) {
        Some(current)
            if current.version == failure.version && failure.pulse != Some(progress_hash(current)) =>
        {
            false
        }
        Some(current) if current.version == failure.version && current.is_finished() => false,
        Some(current) => {
            let progress = if current.version == failure.version {
                current.progress
            } else {
                0
            };
            let start_time = current
                .start_time
                .clone()
                .filter(|_| current.version == failure.version);
            *current = ImageTagStatus {
                progress,
                start_time,
                ..failed
            };
            true
        }
        None => {
            tags.push(failed);
            tags.sort_by(|a, b| a.tag.cmp(&b.tag));
            true
        }
    }
}

fn update_counters(status: &mut NodeImageStatus, spec: &NodeImageSpec) {
    let count = |phase: ImagePullPhase| {
        let tags = status.image_statuses.values().flat_map(|s| &s.tags);
        i32::try_from(tags.filter(|t| t.phase == phase).count()).unwrap_or(i32::MAX)
    };
    status.waiting = count(ImagePullPhase::Waiting);
    status.pulling = count(ImagePullPhase::Pulling);
    status.succeeded = count(ImagePullPhase::Succeeded);
    status.failed = count(ImagePullPhase::Failed);
    let desired = spec.images.values().map(|i| i.tags.len()).sum::<usize>();
    status.desired = i32::try_from(desired).unwrap_or(i32::MAX);
    status.update_progress();
}

#[cfg(test)]
mod tests {
    use super::*;
    use kruise_api::node_image::PulledBytes;

    #[test]
    fn tag_with_newer_status_is_not_marked_failed() {
        let status = |phase, progress| ImageTagStatus {
            tag: "1".into(),
            phase,
            progress,
            start_time: None,
            completion_time: None,
            version: 3,
            image_id: None,
            message: None,
            bytes: None,
        };
        let waiting = || status(ImagePullPhase::Waiting, 0);
        let pulling = |bytes| ImageTagStatus {
            bytes: Some(PulledBytes::new(bytes, 1 << 40)),
            ..status(ImagePullPhase::Pulling, 7)
        };
        for (observed, existing, marked) in [
            (None, None, true),
            (None, Some(waiting()), false),
            (Some(waiting()), Some(waiting()), true),
            (Some(waiting()), Some(status(ImagePullPhase::Pulling, 7)), false),
            (Some(pulling(1)), Some(pulling(1)), true),
            (Some(pulling(1)), Some(pulling(2)), false),
            (
                None,
                Some(ImageTagStatus {
                    version: 2,
                    ..waiting()
                }),
                true,
            ),
        ] {
            let failure = TagFailure {
                image: "nginx".into(),
                tag: "1".into(),
                version: 3,
                pulse: observed.as_ref().map(progress_hash),
                message: "gone",
            };
            let mut all = NodeImageStatus::default();
            let tags = existing.clone().into_iter().collect();
            all.image_statuses.entry("nginx".into()).or_default().tags = tags;
            assert_eq!(
                mark_failed(&mut all, &failure, Timestamp::UNIX_EPOCH),
                marked,
                "{observed:?} {existing:?}"
            );
        }
    }

    #[test]
    fn tag_that_is_marked_failed_has_no_progress() {
        let tags =
            json!([{ "tag": "1", "phase": "Pulling", "version": 3, "bytes": { "done": 1, "total": 2 } }]);
        let status =
            json!({ "desired": 1, "progress": "50% of 2 B", "imageStatuses": { "nginx": { "tags": tags } } });
        let mut status: NodeImageStatus = serde_json::from_value(status).unwrap_or_default();
        status.update_progress();
        assert_eq!(status.progress.as_deref(), Some("50% of 2 B"));
        let current = status
            .image_statuses
            .values()
            .flat_map(|image| &image.tags)
            .next();
        let failure = TagFailure {
            image: "nginx".into(),
            tag: "1".into(),
            version: 3,
            pulse: current.map(progress_hash),
            message: "gone",
        };
        assert!(mark_failed(&mut status, &failure, Timestamp::UNIX_EPOCH));
        update_counters(&mut status, &NodeImageSpec::default());
        assert_eq!((status.failed, status.progress), (1, None));
    }
}

//! Carries a plan for one NodeImage out.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Api, Resource};
use serde_json::{Map, Value, json};

use super::plan::{Act, Failure, Removal};
use crate::Context;
use crate::view::{NodeImageView, pulse};
use kruise_api::image_reference::join;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::node_image::{
    ImagePullPhase, ImageTagStatus, NodeImage, NodeImageSpec, NodeImageStatus, ReferenceObject,
};
use kruise_cluster::{Error, EventType, write};

/// Which of these secrets do not exist any more. One that cannot be asked for counts as there.
pub async fn vanished(ctx: &Context, image: &NodeImageView) -> HashSet<ReferenceObject> {
    let mut gone = HashSet::new();
    let secrets: HashSet<&ReferenceObject> = image.old_secrets.iter().map(|(_, secret)| secret).collect();
    for secret in secrets {
        let api = Api::<Secret>::namespaced(ctx.cluster.client.clone(), &secret.namespace);
        match write::get(&api, &secret.name).await {
            Ok(None) => {
                gone.insert(secret.clone());
            }
            Ok(Some(_)) => {}
            Err(error) => {
                let ReferenceObject { namespace, name, .. } = secret;
                tracing::debug!(namespace, name, %error, "pull secret of a NodeImage cannot be looked up");
            }
        }
    }
    gone
}

/// Does one thing; what is gone already is done.
pub async fn carry_out(
    ctx: &Context,
    name: &str,
    seen: Option<&NodeImageView>,
    act: Act,
    now: Timestamp,
) -> Result<(), Error> {
    let api = Api::<NodeImage>::all(ctx.cluster.client.clone());
    let done = match act {
        Act::Create { labels } => {
            let created = create(&api, name, labels).await;
            created.inspect(|()| tracing::info!(node = name, "NodeImage created"))
        }
        Act::Delete => {
            // The watch of Nodes may be behind that of NodeImages; what is deleted here is lost.
            let nodes = Api::<Node>::all(ctx.cluster.client.clone());
            let node = write::get(&nodes, name).await?;
            if node.is_some_and(|n| n.metadata.deletion_timestamp.is_none()) {
                return Ok(());
            }
            let uid = seen.map_or("", |s| s.uid.as_str());
            let deleted = write::delete(&api, name, uid).await;
            deleted.inspect(|()| tracing::info!(node = name, "NodeImage deleted: its Node has gone"))
        }
        Act::Label(labels) => {
            let body = json!({ "metadata": { "labels": labels } });
            let labelled = write::patch_merge(&api, name, &body).await;
            labelled.map(|_| tracing::info!(node = name, "NodeImage has the labels of its Node"))
        }
        Act::Remove(removal) => remove(ctx, &api, name, &removal).await,
        Act::Fail(failures) => fail(ctx, &api, name, &failures, now).await,
    };
    match done {
        Err(error) if error.not_found() || error.already_exists() => Ok(()),
        other => other,
    }
}

async fn create(api: &Api<NodeImage>, name: &str, labels: BTreeMap<String, String>) -> Result<(), Error> {
    let mut object = NodeImage::new(name, NodeImageSpec::default());
    object.metadata.labels = Some(labels);
    write::create(api, &object).await.map(|_| ())
}

/// Removes tags of exactly the version that was decided on, and images that are left without any.
async fn remove(ctx: &Context, api: &Api<NodeImage>, name: &str, removal: &Removal) -> Result<(), Error> {
    let Some(object) = write::get(api, name).await? else {
        return Ok(());
    };
    let mut unreadable = Vec::new();
    let mut images = Map::new();
    for (image, spec) in &object.spec.images {
        let mut left = spec.clone();
        left.tags.retain(|t| {
            let same = |(i, tag, version): &(String, String, i64)| {
                i == image && *tag == t.tag && *version == t.version
            };
            let removed = removal.tags.iter().any(same);
            if let Some(why) = t.unreadable.as_deref().filter(|_| removed) {
                unreadable.push(format!(
                    "removed {}, which cannot be read: {why}",
                    join(image, &t.tag)
                ));
            }
            !removed
        });
        for tag in &mut left.tags {
            let gone = |uid: &str| {
                let same = |(i, t, u): &(String, String, String)| i == image && *t == tag.tag && u == uid;
                removal.owners.iter().any(same)
            };
            tag.owner_references
                .retain(|owner| !owner.uid.as_deref().is_some_and(gone));
        }
        left.pull_secrets.retain(|s| {
            !removal
                .secrets
                .iter()
                .any(|(i, secret)| i == image && secret == s)
        });
        if left.tags.is_empty() {
            images.insert(image.clone(), Value::Null);
        } else if left != *spec {
            let mut entry = json!(left);
            if left.pull_secrets.is_empty() {
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
        let (about, events) = (object.object_ref(&()), &ctx.cluster.events);
        events.publish(about, EventType::Warning, keys::EVENT_UNREADABLE, "Remove", note);
    }
    Ok(())
}

/// Marks tags as failed on behalf of a daemon that says nothing.
async fn fail(
    ctx: &Context,
    api: &Api<NodeImage>,
    name: &str,
    failures: &[Failure],
    now: Timestamp,
) -> Result<(), Error> {
    let Some(object) = write::get(api, name).await? else {
        return Ok(());
    };
    let mut status = object.status.clone().unwrap_or_default();
    let mut told: Vec<(&Failure, Vec<ObjectReference>)> = Vec::new();
    for failure in failures {
        let spec = object.spec.images.get(&failure.image);
        let wanted = spec.and_then(|s| s.tags.iter().find(|t| t.tag == failure.tag));
        let Some(wanted) = wanted.filter(|t| t.version == failure.version) else {
            continue;
        };
        if mark(&mut status, failure, now) {
            told.push((failure, wanted.owner_references.clone()));
        }
    }
    if told.is_empty() {
        return Ok(());
    }
    recount(&mut status, &object.spec);
    let body = json!({
        "metadata": { "resourceVersion": object.metadata.resource_version },
        "status": status,
    });
    write::patch_status_merge(api, name, &body).await?;
    for (failure, mut owners) in told {
        owners.push(object.object_ref(&()));
        let image = join(&failure.image, &failure.tag);
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

/// Marks one tag, unless the daemon has spoken meanwhile.
fn mark(status: &mut NodeImageStatus, failure: &Failure, now: Timestamp) -> bool {
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
    };
    match tags.iter_mut().find(|t| t.tag == failure.tag) {
        Some(known) if known.version == failure.version && failure.pulse != Some(pulse(known)) => false,
        Some(known) if known.version == failure.version && known.ended() => false,
        Some(known) => {
            let progress = if known.version == failure.version {
                known.progress
            } else {
                0
            };
            let start_time = known
                .start_time
                .clone()
                .filter(|_| known.version == failure.version);
            *known = ImageTagStatus {
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

fn recount(status: &mut NodeImageStatus, spec: &NodeImageSpec) {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_of_which_the_daemon_has_spoken_since_is_not_marked() {
        let status = |phase, progress| ImageTagStatus {
            tag: "1".into(),
            phase,
            progress,
            start_time: None,
            completion_time: None,
            version: 3,
            image_id: None,
            message: None,
        };
        let waiting = || status(ImagePullPhase::Waiting, 0);
        for (seen, there, marked) in [
            (None, None, true),
            (None, Some(waiting()), false),
            (Some(waiting()), Some(waiting()), true),
            (Some(waiting()), Some(status(ImagePullPhase::Pulling, 7)), false),
            (
                None,
                Some(ImageTagStatus {
                    version: 2,
                    ..waiting()
                }),
                true,
            ),
        ] {
            let failure = Failure {
                image: "nginx".into(),
                tag: "1".into(),
                version: 3,
                pulse: seen.as_ref().map(pulse),
                message: "gone",
            };
            let mut all = NodeImageStatus::default();
            let tags = there.clone().into_iter().collect();
            all.image_statuses.entry("nginx".into()).or_default().tags = tags;
            assert_eq!(
                mark(&mut all, &failure, Timestamp::UNIX_EPOCH),
                marked,
                "{seen:?} {there:?}"
            );
        }
    }
}

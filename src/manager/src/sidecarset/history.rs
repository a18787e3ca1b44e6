//! Writes the ControllerRevisions of a set.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::Api;
use serde_json::{Value, json};

use super::SetContext;
use super::observe::versioned_revision;
use crate::view::RevisionView;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::{json::set, keys};
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, Key, write};
use kruise_workload::revision::{Revision, RevisionAction, RevisionOwner};
use kruise_workload::sidecarset::history::{HistoryPlan, KIND};

impl SetContext<'_> {
    fn revisions(&self) -> Api<ControllerRevision> {
        Api::namespaced(self.shared.manager.cluster.client.clone(), &self.shared.namespace)
    }

    fn owner(&self) -> Owner {
        Owner {
            kind: OwnerKind::SidecarSet,
            name: self.name.to_owned(),
            uid: self.uid.to_owned(),
        }
    }
}

/// Makes the revision of the spec the newest. Returns the number of name collisions if its name is taken by another
/// object.
pub async fn write_newest(ctx: &SetContext<'_>, plan: &HistoryPlan) -> Result<Option<i32>, Error> {
    for name in &plan.adopt {
        let patch = json!({ "metadata": { "ownerReferences": [ctx.owner().controller_reference()] } });
        patch_revision(ctx, name, patch).await?;
    }
    let label = plan
        .custom_version
        .as_ref()
        .map(|version| json!({ keys::SIDECAR_SET_CUSTOM_VERSION: version }));
    match &plan.action {
        RevisionAction::UseNewest { name } => {
            if let Some(labels) = label {
                patch_revision(ctx, name, json!({ "metadata": { "labels": labels } })).await?;
            }
            Ok(None)
        }
        RevisionAction::Promote { name, number, .. } => {
            let mut patch = json!({ "revision": number });
            if let Some(labels) = label {
                set(&mut patch, &["metadata", "labels"], labels);
            }
            patch_revision(ctx, name, patch).await?;
            tracing::info!(
                set = ctx.name,
                revision = name,
                number,
                "made an old revision the newest"
            );
            Ok(None)
        }
        RevisionAction::Create { number } => create_revision(ctx, plan, *number).await,
    }
}

async fn create_revision(
    ctx: &SetContext<'_>,
    plan: &HistoryPlan,
    number: i64,
) -> Result<Option<i32>, Error> {
    let owner = RevisionOwner {
        kind: KIND,
        namespace: &ctx.shared.namespace,
        name: ctx.name,
        uid: ctx.uid,
        annotations: &plan.desired.annotations,
    };
    let name = &plan.desired.name;
    match write::create_raw(&ctx.revisions(), plan.desired.request_body(&owner, number)).await {
        Ok(stored) => {
            cache_revision(ctx, &parse(stored)?, Written::Created);
            tracing::info!(set = ctx.name, revision = name, number, "created a revision");
            Ok(None)
        }
        Err(error) if error.already_exists() => {
            let Some(existing) = write::get(&ctx.revisions(), name).await? else {
                return Err(error);
            };
            if is_usable(&existing, &ctx.owner(), &plan.desired.data) {
                cache_revision(ctx, &existing, Written::Created);
                return Ok(None);
            }
            Ok(Some(plan.collisions.saturating_add(1)))
        }
        Err(error) => Err(error),
    }
}

/// Whether a revision of the desired name has the desired data, and is the set's or an orphan with the set's label, which
/// the next reconcile adopts.
fn is_usable(existing: &ControllerRevision, owner: &Owner, data: &str) -> bool {
    let metadata = &existing.metadata;
    let free = match Owner::controller(metadata) {
        Some(controller) => controller == *owner,
        None => {
            let label = metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(keys::SIDECAR_SET_NAME));
            label == Some(&owner.name)
        }
    };
    free && Revision::from(existing).data == data
}

/// Patches a revision if it has not changed since it was observed.
async fn patch_revision(ctx: &SetContext<'_>, name: &str, mut patch: Value) -> Result<(), Error> {
    let key = Key::namespaced(&ctx.shared.namespace, name);
    let version = ctx
        .shared
        .index()
        .revisions
        .get(&key)
        .map(|view| view.resource_version.clone());
    set(&mut patch, &["metadata", "resourceVersion"], json!(version));
    // An orphan keeps its other owners.
    match write::patch_strategic(&ctx.revisions(), name, &patch).await {
        Ok(stored) => {
            cache_revision(ctx, &stored.object()?, Written::Changed);
            Ok(())
        }
        Err(error) => {
            if error.conflict() || error.not_found() {
                fetch_revision(ctx, &key).await?;
            }
            Err(error)
        }
    }
}

/// Reads a revision from the API server and caches it.
pub async fn fetch_revision(ctx: &SetContext<'_>, key: &Key) -> Result<(), Error> {
    let found = write::get(&ctx.revisions(), &key.name).await?;
    let view = found.as_ref().and_then(RevisionView::from_object);
    let entry = view.map(|view| versioned_revision(Arc::new(view)));
    let mut index = ctx.shared.index();
    index.revisions.apply_read(key, entry, Instant::now());
    Ok(())
}

/// Deletes the revisions that nothing needs.
pub async fn delete_surplus(ctx: &SetContext<'_>, plan: &HistoryPlan) -> Result<(), Error> {
    for name in &plan.delete {
        let key = Key::namespaced(&ctx.shared.namespace, name);
        let uid = ctx.shared.index().revisions.uid(&key).map(str::to_owned);
        let Some(uid) = uid else { continue };
        match write::delete(&ctx.revisions(), name, &uid).await {
            Err(error) if !error.not_found() && !error.conflict() => return Err(error),
            _ => ctx
                .shared
                .index()
                .revisions
                .mark_deleted(&key, &uid, Instant::now()),
        }
    }
    Ok(())
}

fn cache_revision(ctx: &SetContext<'_>, object: &ControllerRevision, what: Written) {
    if let Some(view) = RevisionView::from_object(object) {
        let entry = versioned_revision(Arc::new(view));
        ctx.shared
            .index()
            .revisions
            .apply_write(&Key::from_object(object), entry, what, Instant::now());
    }
}

fn parse(stored: Value) -> Result<ControllerRevision, Error> {
    serde_json::from_value(stored)
        .map_err(|why| Error::Transport(format!("cannot read the ControllerRevision: {why}")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use kube::client::Body;

    use super::*;
    use crate::Context;
    use crate::sidecarset::ControllerState;
    use kruise_api::owner::controller_reference;
    use kruise_api::sidecarset::SidecarSet;
    use kruise_workload::sidecarset::history::{HistoryOwner, desired_revision};
    use kruise_workload::sidecarset::set::SetView;

    fn revision(label: &str, owners: &Value) -> ControllerRevision {
        let revision = json!({ "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1, "data": { "a": 1 },
            "metadata": { "name": "log-1", "namespace": "kruise-system", "uid": "r", "resourceVersion": "1",
                "labels": { keys::SIDECAR_SET_NAME: label }, "ownerReferences": owners } });
        serde_json::from_value(revision).unwrap()
    }

    #[test]
    fn orphan_with_the_same_data_is_no_collision() {
        let owner = Owner {
            kind: OwnerKind::SidecarSet,
            name: "log".to_owned(),
            uid: "u".to_owned(),
        };
        let other = json!([{ "apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "c" }]);
        let of = |uid: &str| json!([controller_reference("SidecarSet", "log", uid)]);
        for (label, owners, data, usable) in [
            ("log", json!([]), r#"{"a":1}"#, true),
            ("log", other, r#"{"a":1}"#, true),
            ("web", of("u"), r#"{"a":1}"#, true),
            ("web", json!([]), r#"{"a":1}"#, false),
            ("log", json!([]), r#"{"a":2}"#, false),
            ("log", of("before"), r#"{"a":1}"#, false),
        ] {
            let existing = revision(label, &owners);
            assert_eq!(is_usable(&existing, &owner, data), usable, "{label} {owners}");
        }
    }

    /// The list of owners is merged by UID; a JSON merge patch would replace it.
    #[tokio::test]
    async fn adoption_keeps_other_owners() {
        let patches = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&patches);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let content = request.headers().get(http::header::CONTENT_TYPE).cloned();
            seen.lock()
                .unwrap()
                .push(content.unwrap().to_str().unwrap().to_owned());
            let body = json!(revision("log", &json!([]))).to_string().into_bytes();
            std::future::ready(http::Response::builder().body(Body::from(body)))
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let shared = ControllerState::new(ctx, "kruise-system");
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": "log", "uid": "u" }, "spec": { "selector": { "matchLabels": { "app": "web" } } } });
        let set: SidecarSet = serde_json::from_value(set).unwrap();
        let ctx = SetContext {
            shared: &shared,
            set: &set,
            name: "log",
            uid: "u",
        };
        let owner = HistoryOwner {
            set: SetView::from(&set),
            uid: "u",
            labels: &std::collections::BTreeMap::new(),
            collisions: None,
        };
        let name = "log-1".to_owned();
        let plan = HistoryPlan {
            latest: name.clone(),
            collisions: 0,
            action: RevisionAction::UseNewest { name: name.clone() },
            desired: desired_revision(&owner),
            custom_version: None,
            adopt: vec![name],
            delete: Vec::new(),
        };
        assert_eq!(write_newest(&ctx, &plan).await.unwrap(), None);
        assert_eq!(
            *patches.lock().unwrap(),
            ["application/strategic-merge-patch+json"]
        );
    }
}

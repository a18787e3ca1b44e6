//! Writes the ControllerRevisions of a set.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::Api;
use serde_json::{Value, json};

use super::context::{SetContext, SetState};
use super::observe::versioned_revision;
use crate::view::RevisionView;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::sidecarset::SidecarSet;
use kruise_api::{json::set, keys};
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, Key, write};
use kruise_workload::revision::{Revision, RevisionAction, RevisionOwner};
use kruise_workload::sidecarset::history::{HistoryPlan, KIND};

/// Pause before the adoption, or the deletion, of revisions that was refused is tried again.
const REFUSED_RETRY: Duration = Duration::from_secs(30);

/// Whether a change of a revision is refused for longer. A webhook chooses the code of its denial.
fn is_refused(error: &Error) -> bool {
    error.denied() || (!error.retryable() && !error.not_found())
}

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

    /// Whether the set exists and is not being deleted: the watch may be behind.
    async fn exists(&self) -> Result<bool, Error> {
        let sets: Api<SidecarSet> = Api::all(self.shared.manager.cluster.client.clone());
        let found = write::get(&sets, self.name).await?;
        Ok(found.is_some_and(|found| {
            let metadata = &found.metadata;
            metadata.uid.as_deref() == Some(self.uid) && metadata.deletion_timestamp.is_none()
        }))
    }
}

/// Makes the revision of the spec the newest. Returns the number of name collisions if its name is taken by another
/// object.
pub async fn write_newest(
    ctx: &SetContext<'_>,
    plan: &HistoryPlan,
    state: &mut SetState,
) -> Result<Option<i32>, Error> {
    adopt_revisions(ctx, plan, state).await?;
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

/// Adopts revisions that a deletion without dependents left behind, unless the set is gone, too: the garbage collector
/// would delete them with it, and Pods of a new set of that name may need them.
async fn adopt_revisions(
    ctx: &SetContext<'_>,
    plan: &HistoryPlan,
    state: &mut SetState,
) -> Result<(), Error> {
    let may_try = state.adoption_retry_at.is_none_or(|at| at <= Instant::now());
    if plan.adopt.is_empty() || !may_try || !ctx.exists().await? {
        return Ok(());
    }
    for name in &plan.adopt {
        let patch = json!({ "metadata": { "ownerReferences": [ctx.owner().controller_reference()] } });
        match patch_revision(ctx, name, patch).await {
            // OpenKruise adopts none, and uses them nevertheless.
            Err(error) if is_refused(&error) => {
                tracing::warn!(set = ctx.name, revision = name, %error, "cannot adopt a revision; will retry");
                state.adoption_retry_at = Some(Instant::now() + REFUSED_RETRY);
            }
            result => result?,
        }
    }
    Ok(())
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
pub async fn delete_surplus(
    ctx: &SetContext<'_>,
    plan: &HistoryPlan,
    state: &mut SetState,
) -> Result<(), Error> {
    let may_try = state.deletion_retry_at.is_none_or(|at| at <= Instant::now());
    for name in plan.delete.iter().filter(|_| may_try) {
        let key = Key::namespaced(&ctx.shared.namespace, name);
        let uid = ctx.shared.index().revisions.uid(&key).map(str::to_owned);
        let Some(uid) = uid else { continue };
        match write::delete(&ctx.revisions(), name, &uid).await {
            // Updates and status do not wait for it.
            Err(error) if is_refused(&error) => {
                tracing::warn!(set = ctx.name, revision = name, %error, "cannot delete a revision; will retry");
                state.deletion_retry_at = Some(Instant::now() + REFUSED_RETRY);
            }
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
    use crate::sidecarset::context::ControllerState;
    use kruise_api::owner::controller_reference;
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

    /// Method and content type of the writes when two reconciles adopt an orphan, or delete a revision. The API server has
    /// a set with this UID, and answers writes so.
    async fn written(adopts: bool, stored_uid: &str, code: u16, answer: Value) -> Vec<String> {
        let writes = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&writes);
        let stored = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": "log", "uid": stored_uid }, "spec": {} });
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let content = request.headers().get(http::header::CONTENT_TYPE).cloned();
            let (code, body) = match request.method() {
                &http::Method::GET => (200, &stored),
                method => {
                    let content = content.unwrap().to_str().unwrap().to_owned();
                    seen.lock().unwrap().push(format!("{method} {content}"));
                    (code, &answer)
                }
            };
            let body = Body::from(body.to_string().into_bytes());
            std::future::ready(http::Response::builder().status(code).body(body))
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
        let view = RevisionView::from_object(&revision("log", &json!([]))).unwrap();
        let key = Key::namespaced("kruise-system", name.as_str());
        let entry = versioned_revision(Arc::new(view));
        shared.index().revisions.apply_watch(&key, entry);
        let plan = HistoryPlan {
            latest: name.clone(),
            collisions: 0,
            action: RevisionAction::UseNewest { name: name.clone() },
            desired: desired_revision(&owner),
            custom_version: None,
            adopt: vec![name.clone()],
            delete: vec![name],
        };
        let mut state = SetState::default();
        for _ in 0..2 {
            if adopts {
                assert_eq!(write_newest(&ctx, &plan, &mut state).await.unwrap(), None);
            } else {
                delete_surplus(&ctx, &plan, &mut state).await.unwrap();
            }
        }
        std::mem::take(&mut *writes.lock().unwrap())
    }

    fn denial(code: u16) -> Value {
        json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "Some",
            "message": "admission webhook \"w\" denied the request: no" })
    }

    /// The list of owners is merged by UID; a JSON merge patch would replace it.
    #[tokio::test]
    async fn adoption_keeps_other_owners() {
        let writes = written(true, "u", 200, json!(revision("log", &json!([])))).await;
        assert_eq!(writes, ["PATCH application/strategic-merge-patch+json"; 2]);
    }

    /// The garbage collector would delete the revision, which Pods of the new set may need.
    #[tokio::test]
    async fn set_that_was_deleted_adopts_nothing() {
        let writes = written(true, "new", 200, json!(revision("log", &json!([])))).await;
        assert!(writes.is_empty());
    }

    #[tokio::test]
    async fn revision_whose_adoption_is_refused_is_used() {
        for code in [403, 503] {
            let writes = written(true, "u", code, denial(code)).await;
            assert_eq!(writes.len(), 1, "it is not tried again at once");
        }
    }

    #[tokio::test]
    async fn refused_deletion_of_a_revision_fails_no_reconcile() {
        for code in [403, 503] {
            let writes = written(false, "u", code, denial(code)).await;
            assert_eq!(writes.len(), 1, "it is not tried again at once");
        }
    }
}

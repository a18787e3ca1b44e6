//! Migrates objects that another installation stored in v1alpha1.
//!
//! While an object is stored as v1alpha1, each read of it needs our conversion webhook. So the leader writes each such
//! object again, which stores it as v1beta1, without the managed fields of v1alpha1, and then removes v1alpha1 from the
//! CRD's `status.storedVersions`.
//!
//! A client that writes an object in v1alpha1 later also leaves such managed fields in it, and then each write needs
//! the webhook. So each leader checks for them once. It keeps those of server-side apply: without them, a client that
//! applies in v1alpha1 could not remove a field.

use std::collections::HashSet;
use std::time::Duration;

use futures::future::join_all;
use futures::{StreamExt, stream};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams};
use serde_json::json;

use super::crd::Crd;
use kruise_api::backoff::Backoff;
use kruise_api::{GROUP, Kind, V1ALPHA1, V1BETA1};
use kruise_cluster::write::{ManagedFields, ManagedFieldsPatch, Metadata};
use kruise_cluster::{Cluster, Error, Key, write};
use kruise_ops::panics::catch_panic;

const PAGE_SIZE: u32 = 500;
const MAX_CONCURRENT_WRITES: usize = 8;
/// How often an object is read again because of a conflict.
const MAX_CONFLICTS: u32 = 10;
/// Objects of a kind that are remembered as rewritten, so that one that cannot be does not have all rewritten each time.
const MAX_REMEMBERED: usize = 100_000;
/// After failures.
const RETRY: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(600));
/// Nothing waits for the migration, and there may be many pages.
const BETWEEN_PAGES: Duration = Duration::from_millis(500);

/// Migrates until nothing is stored in the older version. A kind with an object that cannot be rewritten, for example
/// because a policy of the cluster rejects it, does not block other kinds.
pub(super) async fn migrate_all(cluster: &Cluster) {
    join_all(Kind::ALL.map(|kind| migrate_with_retries(cluster, kind))).await;
}

async fn migrate_with_retries(cluster: &Cluster, target: Kind) {
    let kind = target.info().name;
    let mut rewritten = HashSet::new();
    for failures in 0.. {
        let migration = migrate_kind(cluster, target, &mut rewritten);
        let migrated = catch_panic(super::HEALTH_CHECK, kind, migration).await;
        match migrated.map_err(Error::from).flatten() {
            Ok(0) => return,
            Ok(count) => {
                return tracing::info!(kind, count, "objects are stored as v1beta1 now");
            }
            // The API server may not trust the webhook yet, or the CRD is not installed.
            Err(why) => {
                tracing::warn!(kind, %why, "cannot renew stored objects yet");
            }
        }
        tokio::time::sleep(RETRY.delay(failures)).await;
    }
}

/// Which objects are written again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RewriteScope {
    /// Every object: some are stored in the older version.
    All,
    /// Objects with managed fields in the older version that are not from server-side apply.
    OldManagedFields,
}

/// Returns the number of rewritten objects. If one cannot be rewritten, the older version stays in `storedVersions`;
/// the others are rewritten all the same. `rewritten` has the UIDs of those that need it no more.
async fn migrate_kind(
    cluster: &Cluster,
    kind: Kind,
    rewritten: &mut HashSet<String>,
) -> Result<usize, Error> {
    let crds: Api<Crd> = Api::all(cluster.client.clone());
    if !kind.info().versions.contains(&V1BETA1) {
        return Ok(0);
    }
    let name = kind.crd_name();
    let Some(crd) = write::get(&crds, &name).await? else {
        return Ok(0);
    };
    if crd.stored_versions().iter().all(|version| version == V1BETA1) {
        // Managed fields in the older version may be new.
        return rewrite_all(cluster, kind, RewriteScope::OldManagedFields, &mut HashSet::new()).await;
    }
    let count = rewrite_all(cluster, kind, RewriteScope::All, rewritten).await?;
    let patch = json!({ "status": { "storedVersions": [V1BETA1] } });
    write::patch_status_merge(&crds, &name, &patch).await?;
    Ok(count)
}

async fn rewrite_all(
    cluster: &Cluster,
    kind: Kind,
    scope: RewriteScope,
    rewritten: &mut HashSet<String>,
) -> Result<usize, Error> {
    let resource = ApiResource {
        group: GROUP.to_owned(),
        version: V1BETA1.to_owned(),
        api_version: format!("{GROUP}/{V1BETA1}"),
        kind: kind.info().name.to_owned(),
        plural: kind.info().plural.to_owned(),
    };
    let all: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
    let (mut count, mut params) = (0, ListParams::default().limit(PAGE_SIZE));
    let mut failed = None;
    loop {
        let page = write::list_metadata(&all, &resource, &params).await?;
        let next = page.metadata.continue_.filter(|next| !next.is_empty());
        let items = page.items.into_iter().map(|object| object.metadata);
        let items: Vec<_> = items
            .filter(|object| !rewritten.contains(&object.uid) && migration_patch(object, scope).is_some())
            .collect();
        count += items.len();
        let writes = stream::iter(items).map(|object| {
            let uid = object.uid.clone();
            let write = rewrite_or_log(cluster, &resource, object, scope);
            async { (uid, write.await) }
        });
        let mut writes = writes.buffer_unordered(MAX_CONCURRENT_WRITES);
        while let Some((uid, result)) = writes.next().await {
            match result {
                Ok(()) if rewritten.len() < MAX_REMEMBERED => drop(rewritten.insert(uid)),
                Ok(()) => {}
                Err(why) => failed = failed.or(Some(why)),
            }
        }
        drop(writes);
        let Some(next) = next else { break };
        params = params.continue_token(&next);
        tokio::time::sleep(BETWEEN_PAGES).await;
    }
    failed.map_or(Ok(count), Err)
}

/// A panic is a failure of this object alone.
async fn rewrite_or_log(
    cluster: &Cluster,
    resource: &ApiResource,
    object: Metadata,
    scope: RewriteScope,
) -> Result<(), Error> {
    let kind = &resource.kind;
    let (name, namespace) = (object.name.clone(), object.namespace.clone());
    let api: Api<DynamicObject> = match &namespace {
        Some(namespace) => Api::namespaced_with(cluster.client.clone(), namespace, resource),
        None => Api::all_with(cluster.client.clone(), resource),
    };
    let key = Key {
        namespace: namespace.clone(),
        name: name.clone(),
    };
    let label = format!("{kind} {key}");
    let result = catch_panic(super::HEALTH_CHECK, label, rewrite(&api, resource, object, scope)).await;
    let result = result.map_err(Error::from).flatten();
    if let Err(why) = &result {
        tracing::warn!(kind, namespace, name, %why, "object cannot be stored as v1beta1 yet");
    }
    result
}

/// The write changes the stored form, so the API server stores the object again, without the entries that make it
/// convert the object at each write.
async fn rewrite(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    mut metadata: Metadata,
    scope: RewriteScope,
) -> Result<(), Error> {
    for _ in 0..MAX_CONFLICTS {
        let Some(patch) = migration_patch(&metadata, scope) else {
            return Ok(());
        };
        let result = write::patch_metadata(api, resource, &metadata.name, &patch).await;
        match result {
            Err(why) if why.conflict() => {}
            Err(why) if why.not_found() => return Ok(()),
            outcome => return outcome,
        }
        match write::get_metadata(api, resource, &metadata.name).await? {
            Some(newer) => metadata = newer,
            None => return Ok(()),
        }
    }
    Err(Error::Transport(format!(
        "{} {} changed {MAX_CONFLICTS} times while it was renewed",
        resource.kind, metadata.name
    )))
}

/// A patch that changes nothing but managed fields in the older version: at each write the API server converts the
/// object into each version of an entry, and drops all entries if it cannot.
fn migration_patch(metadata: &Metadata, scope: RewriteScope) -> Option<ManagedFieldsPatch<'_>> {
    let old = format!("{GROUP}/{V1ALPHA1}");
    let all = &metadata.managed_fields;
    let is_old_version = |entry: &&ManagedFields| {
        let (version, operation) = entry.origin();
        version == old && (scope == RewriteScope::All || operation != "Apply")
    };
    let remaining: Vec<_> = all.iter().filter(|entry| !is_old_version(entry)).collect();
    if remaining.len() == all.len() {
        return (scope == RewriteScope::All).then(ManagedFieldsPatch::default);
    }
    let version = metadata.resource_version.as_deref();
    Some(ManagedFieldsPatch::new(version, remaining))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use http::Method;
    use kruise_ops::panics::injected::inject_panic;
    use kube::client::Body;
    use tokio::sync::mpsc::{self, UnboundedReceiver};
    use tokio::time::{Instant, timeout};

    use super::*;

    /// Migrates the NodeImages `bad` and `good`; returns the paths of the patches.
    fn migrating_cluster() -> (Cluster, UnboundedReceiver<String>) {
        let (patched_tx, patched) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let patched_tx = patched_tx.clone();
            async move {
                let path = request.uri().path().to_owned();
                let metadata = |name: &str| json!({ "metadata": { "name": name, "uid": name } });
                let response = if path.ends_with("/nodeimages") {
                    json!({ "metadata": {}, "items": [metadata("bad"), metadata("good")] })
                } else {
                    let mut crd = metadata("crd");
                    crd["status"] = json!({ "storedVersions": [V1ALPHA1, V1BETA1] });
                    crd
                };
                if *request.method() == Method::PATCH {
                    patched_tx.send(path).unwrap();
                }
                http::Response::builder().body(Body::from(response.to_string().into_bytes()))
            }
        });
        let cluster = Cluster::from_client(kube::Client::new(service, "default"));
        (cluster, patched)
    }

    async fn wait_for_patch(patched: &mut UnboundedReceiver<String>, end: &str) {
        let wait = async { while !patched.recv().await.unwrap().ends_with(end) {} };
        timeout(Duration::from_secs(3600), wait).await.unwrap();
    }

    /// Whether one object panics, or the whole kind: the migration is tried again, and never ends the process.
    #[tokio::test(start_paused = true)]
    async fn panicking_migration_is_retried_after_backoff() {
        for object in ["NodeImage bad", "NodeImage"] {
            let (cluster, mut patched) = migrating_cluster();
            let migration = migrate_with_retries(&cluster, Kind::NodeImage);
            let panics = inject_panic(super::super::HEALTH_CHECK, object);
            let check = async {
                let started = Instant::now();
                panics.wait_for(3).await;
                assert!(started.elapsed() >= RETRY.delay(0) + RETRY.delay(1), "{object}");
                let paths: Vec<String> = std::iter::from_fn(|| patched.try_recv().ok()).collect();
                let good = |path: &String| path.ends_with("/nodeimages/good");
                assert!(paths.iter().all(good), "{paths:?}");
                // Once, in the first of three rounds.
                assert_eq!(paths.len(), usize::from(object != "NodeImage"), "{paths:?}");
                drop(panics);
                wait_for_patch(&mut patched, "/nodeimages/bad").await;
                wait_for_patch(&mut patched, "/nodeimages.apps.kruise.io/status").await;
            };
            tokio::join!(migration, check);
        }
    }

    fn metadata(entries: &[(&str, &str)]) -> Metadata {
        let entries: Vec<_> = entries
            .iter()
            .map(|(version, operation)| {
                json!({ "manager": "m", "time": "9999-12-31T23:59:59Z", "operation": operation,
                "apiVersion": format!("{GROUP}/{version}"), "fieldsV1": { "f:spec": {} } })
            })
            .collect();
        serde_json::from_value(json!({ "name": "a", "resourceVersion": "7", "managedFields": entries }))
            .unwrap()
    }

    #[test]
    fn old_version_managed_fields_are_dropped() {
        let (old, new) = (("v1alpha1", "Update"), ("v1beta1", "Update"));
        let applied = ("v1alpha1", "Apply");
        for current in [&[][..], &[new]] {
            let metadata = metadata(current);
            assert_eq!(json!(migration_patch(&metadata, RewriteScope::All)), json!({}));
            assert!(migration_patch(&metadata, RewriteScope::OldManagedFields).is_none());
        }
        let remaining = |entries: &[_], scope| {
            let patch = json!(migration_patch(&metadata(entries), scope));
            assert_eq!(patch["metadata"]["resourceVersion"], "7");
            patch["metadata"]["managedFields"].clone()
        };
        let entries = |entries: &[_]| json!(metadata(entries).managed_fields);
        for scope in [RewriteScope::All, RewriteScope::OldManagedFields] {
            assert_eq!(remaining(&[old, new], scope), entries(&[new]));
            assert_eq!(remaining(&[old], scope), json!([{}]));
        }
        assert_eq!(
            remaining(&[old, applied, new], RewriteScope::All),
            entries(&[new])
        );
        assert_eq!(
            remaining(&[old, applied, new], RewriteScope::OldManagedFields),
            entries(&[applied, new])
        );
        assert!(migration_patch(&metadata(&[applied, new]), RewriteScope::OldManagedFields).is_none());
    }
}

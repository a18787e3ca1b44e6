//! Writes: each with a deadline, each counted by kind and result.
//!
//! Every function returns the object as the API server stored it, which is what tracks our own writes.
//! Nothing here retries: the caller decides again on fresh facts.

use std::fmt::Debug;
use std::time::Duration;

use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Error;
use crate::ops::metrics::metrics;

/// The longest that a single call to the API server may take.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// What a kind must be able to do to be written.
pub trait Object: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize {}
impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize> Object for K {}

/// Creates `object`.
///
/// # Errors
/// See [`Error`]; [`Error::already_exists`] when the name is taken.
pub async fn create<K: Object>(api: &Api<K>, object: &K) -> Result<K, Error> {
    timed::<K, _>("create", api.create(&PostParams::default(), object)).await
}

/// Creates an object of `kind` at `path` with `body` as its bytes are, and gives the answer as it comes: for
/// what our types would lose, be it fields or the spelling of bytes that are compared.
///
/// # Errors
/// See [`Error`].
pub async fn post(client: &kube::Client, kind: &str, path: &str, body: String) -> Result<Value, Error> {
    let request = http::Request::post(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.into_bytes())
        .map_err(|why| Error::Config(format!("{path:?} is no path: {why}")))?;
    counted(kind, "create", client.request(request)).await
}

/// Sends a JSON merge patch of the object itself. With `metadata.resourceVersion` in the patch a change by
/// someone else is a [`Error::conflict`].
///
/// # Errors
/// See [`Error`].
pub async fn patch_merge<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error> {
    timed::<K, _>(
        "patch",
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)),
    )
    .await
}

/// Sends a JSON merge patch of the status subresource.
///
/// # Errors
/// See [`Error`].
pub async fn patch_status_merge<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error> {
    timed::<K, _>(
        "patch_status",
        api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)),
    )
    .await
}

/// Sends a strategic merge patch of the status subresource; for built-in kinds only, whose lists merge by key.
///
/// # Errors
/// See [`Error`].
pub async fn patch_status_strategic<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error> {
    timed::<K, _>(
        "patch_status",
        api.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)),
    )
    .await
}

/// Sends a strategic merge patch of the object itself; for built-in kinds only.
///
/// # Errors
/// See [`Error`].
pub async fn patch_strategic<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error> {
    timed::<K, _>(
        "patch",
        api.patch(name, &PatchParams::default(), &Patch::Strategic(patch)),
    )
    .await
}

/// Sends a strategic merge patch of the resize subresource of a Pod.
///
/// # Errors
/// See [`Error`].
pub async fn patch_resize<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<K, Error> {
    let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
    timed::<K, _>(
        "patch_resize",
        api.patch_subresource("resize", name, &params, &patch),
    )
    .await
}

/// Replaces the whole object; only for kinds that are ours alone, such as a Lease or a Secret copy.
///
/// # Errors
/// See [`Error`]; [`Error::conflict`] when `object` is not the newest.
pub async fn replace<K: Object>(api: &Api<K>, object: &K) -> Result<K, Error> {
    timed::<K, _>(
        "update",
        api.replace(&object.name_any(), &PostParams::default(), object),
    )
    .await
}

/// Deletes the object of that name, if it still has that UID. That it is gone already is no error.
///
/// # Errors
/// See [`Error`]; [`Error::conflict`] when another object has the name now.
pub async fn delete<K: Object>(api: &Api<K>, name: &str, uid: Option<&str>) -> Result<(), Error> {
    delete_seen(api, name, uid, None).await
}

/// The same, if it still has that version, too.
///
/// # Errors
/// See [`Error`]; [`Error::conflict`] when the object is another now.
pub async fn delete_seen<K: Object>(
    api: &Api<K>,
    name: &str,
    uid: Option<&str>,
    version: Option<&str>,
) -> Result<(), Error> {
    let preconditions = kube::api::Preconditions {
        uid: uid.map(str::to_owned),
        resource_version: version.map(str::to_owned),
    };
    let params = DeleteParams {
        preconditions: (uid.is_some() || version.is_some()).then_some(preconditions),
        ..DeleteParams::default()
    };
    let request = kube::core::Request::new(api.resource_url()).delete(name, &params);
    // `Api::delete` parses the answer twice; it is the whole object, and nobody looks at it.
    let client = api.clone().into_client();
    let delete = async {
        client
            .request_text(request.map_err(kube::Error::BuildRequest)?)
            .await
    };
    match timed::<K, _>("delete", delete).await {
        Ok(_) => Ok(()),
        Err(error) if error.not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Reads the object of that name from the API server itself, `None` when there is none.
///
/// # Errors
/// See [`Error`].
pub async fn get<K: Object>(api: &Api<K>, name: &str) -> Result<Option<K>, Error> {
    bounded(&K::kind(&()), "get", api.get_opt(name)).await
}

async fn timed<K: Object, T>(
    verb: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    counted(&K::kind(&()), verb, call).await
}

async fn counted<T>(
    kind: &str,
    verb: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    let result = bounded(kind, verb, call).await;
    let word = result.as_ref().map_or_else(Error::category, |_| "ok");
    let labels = [
        ("kind", kind.to_owned()),
        ("verb", verb.to_owned()),
        ("result", word.to_owned()),
    ];
    metrics().api_writes.get_or_create(&labels).inc();
    result
}

async fn bounded<T>(
    kind: &str,
    verb: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(result) => result.map_err(Error::from),
        Err(_) => Err(Error::Timeout {
            verb,
            kind: kind.to_owned(),
            after: DEADLINE,
        }),
    }
}

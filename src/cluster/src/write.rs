//! Requests about objects: each with a deadline, each write counted by kind and result.
//!
//! Names and namespaces become parts of a path. What is not a DNS name is refused before anything is sent: `?`, `#` and
//! `/` in it would change our request. Lists and watches, which name no object, do not come here.
//!
//! Every write returns the object as the API server [`Stored`] it, so that our own writes can be tracked. Responses are
//! read as stores read objects, by `Lenient`: another writer's unreadable fields do not make our write a failed one.
//! Nothing here retries: the caller decides again on fresh data.

use std::fmt::Debug;
use std::time::Duration;

use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GetParams, ListParams, ObjectList, Patch, PatchParams,
    PostParams,
};
use kube::core::{Request, request};
use kube::{Client, Resource};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::watch::Lenient;
use super::{Error, ObjectView, page};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kruise_api::names;
use kruise_ops::metrics::metrics;

/// Timeout of a single call to the API server.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Characters of an invalid name that an error repeats.
const MAX_SHOWN_CHARS: usize = 100;

/// Traits that a kind needs to be written.
pub trait Object: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize {}
impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize> Object for K {}

/// The response to a successful write.
#[derive(Clone, Debug)]
pub struct Stored<K> {
    verb: &'static str,
    object: Result<K, String>,
}

impl<K: Resource<DynamicType = ()>> Stored<K> {
    /// The object as it is stored.
    ///
    /// # Errors
    /// [`Error::Unreadable`], although the write was done.
    pub fn object(self) -> Result<K, Error> {
        or_unreadable::<K, _>(self.verb, self.object)
    }
}

fn or_unreadable<K: Resource<DynamicType = ()>, R>(
    verb: &'static str,
    object: Result<R, String>,
) -> Result<R, Error> {
    object.map_err(|why| Error::Unreadable {
        verb,
        kind: K::kind(&()).into_owned(),
        why,
    })
}

/// Creates `object`.
///
/// # Errors
/// See [`Error`]; [`Error::already_exists`] when the name is taken.
pub async fn create<K: Object>(api: &Api<K>, object: &K) -> Result<Stored<K>, Error> {
    validate_names(api, None)?;
    let body = serde_json::to_vec(object).map_err(kube::Error::SerdeError)?;
    let request = Request::new(api.resource_url()).create(&PostParams::default(), body);
    send_write(api, "create", request).await
}

/// Creates an object that the API server answers and does not store, such as a TokenReview: it has no name.
///
/// # Errors
/// See [`Error`].
pub async fn create_review<K: Object>(api: &Api<K>, review: &K) -> Result<K, Error> {
    let body = serde_json::to_vec(review).map_err(kube::Error::SerdeError)?;
    let request = Request::new(api.resource_url()).create(&PostParams::default(), body);
    with_kind_metrics::<K, _>("create", send(&api.clone().into_client(), request)).await
}

/// A token of a service account, without `Debug`: it is a secret.
pub struct IssuedToken {
    /// The token.
    pub token: String,
    /// How long it is valid.
    pub valid_for: Duration,
}

/// Requests a token of a service account. No error, and no line of the log, has a part of the response.
///
/// # Errors
/// See [`Error`].
pub async fn create_token(
    api: &Api<ServiceAccount>,
    name: &str,
    token_request: &TokenRequest,
) -> Result<IssuedToken, Error> {
    const VERB: &str = "create_token";
    validate_names(api, Some(name))?;
    let body = serde_json::to_vec(token_request).map_err(kube::Error::SerdeError)?;
    let request = Request::new(api.resource_url());
    let request = request.create_subresource("token", name, &PostParams::default(), body);
    let client = api.clone().into_client();
    // `Client::request` logs a response that it cannot parse.
    let answer = async {
        client
            .request_text(request.map_err(kube::Error::BuildRequest)?)
            .await
    };
    let text = with_kind_metrics::<ServiceAccount, _>(VERB, Box::pin(answer)).await?;
    let answer = serde_json::from_str::<TokenAnswer>(&text).ok();
    let issued = answer.and_then(|TokenAnswer { spec, status }| {
        let seconds = u64::try_from(spec.expiration_seconds).ok()?;
        (!status.token.is_empty()).then(|| IssuedToken {
            token: status.token,
            valid_for: Duration::from_secs(seconds),
        })
    });
    or_unreadable::<ServiceAccount, _>(VERB, issued.ok_or_else(|| "it has no token".to_owned()))
}

/// What is read of a TokenRequest that the API server has answered.
#[derive(Deserialize)]
struct TokenAnswer {
    spec: TokenAnswerSpec,
    status: TokenAnswerStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenAnswerSpec {
    /// As granted, which may be less than requested.
    expiration_seconds: i64,
}

#[derive(Deserialize)]
struct TokenAnswerStatus {
    token: String,
}

/// Creates an object with `body` byte for byte, and returns the response as it comes, without managed fields: for data
/// that our types would lose, be it fields or the spelling of bytes that are compared.
///
/// # Errors
/// See [`Error`].
pub async fn create_raw<K: Object>(api: &Api<K>, body: String) -> Result<Value, Error> {
    create_raw_with(api, body, &PostParams::default(), false).await
}

/// The same as a dry run: returns what the API server would store.
///
/// # Errors
/// See [`Error`].
pub async fn create_dry_run<K: Object>(api: &Api<K>, body: String) -> Result<Value, Error> {
    create_raw_with(api, body, &dry_run_params(), false).await
}

/// The same; fields that the API server does not know are refused (`fieldValidation=Strict`).
///
/// # Errors
/// See [`Error`].
pub async fn create_dry_run_strict<K: Object>(api: &Api<K>, body: String) -> Result<Value, Error> {
    create_raw_with(api, body, &dry_run_params(), true).await
}

fn dry_run_params() -> PostParams {
    PostParams {
        dry_run: true,
        ..PostParams::default()
    }
}

async fn create_raw_with<K: Object>(
    api: &Api<K>,
    body: String,
    params: &PostParams,
    strict: bool,
) -> Result<Value, Error> {
    validate_names(api, None)?;
    let request = Request::new(api.resource_url()).create(params, body.into_bytes());
    let request = if strict {
        request.map(with_strict_validation)
    } else {
        request
    };
    let client = api.clone().into_client();
    let answer = with_kind_metrics::<K, _>("create", send::<Lenient<Value>>(&client, request)).await?;
    or_unreadable::<K, _>("create", answer.into_result())
}

/// The request with `fieldValidation=Strict`, for which the client library has no parameter.
fn with_strict_validation(mut request: http::Request<Vec<u8>>) -> http::Request<Vec<u8>> {
    let uri = format!("{}&fieldValidation=Strict", request.uri());
    if let Ok(uri) = uri.parse() {
        *request.uri_mut() = uri;
    }
    request
}

/// Sends a JSON merge patch of the object itself. With `metadata.resourceVersion` in the patch, a change by another
/// writer is a [`Error::conflict`].
///
/// # Errors
/// See [`Error`].
pub async fn patch_merge<K: Object>(
    api: &Api<K>,
    name: &str,
    patch: &(impl Serialize + Debug),
) -> Result<Stored<K>, Error> {
    send_patch(api, "patch", name, None, &Patch::Merge(patch)).await
}

/// Sends a JSON merge patch of the status subresource.
///
/// # Errors
/// See [`Error`].
pub async fn patch_status_merge<K: Object>(
    api: &Api<K>,
    name: &str,
    patch: &Value,
) -> Result<Stored<K>, Error> {
    send_patch(api, "patch_status", name, Some("status"), &Patch::Merge(patch)).await
}

/// Dry run of a JSON merge patch of the status subresource: checks whether it would be accepted.
///
/// # Errors
/// See [`Error`].
pub async fn dry_run_patch_status<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<(), Error> {
    send_dry_run_patch(api, "patch_status", name, Some("status"), &Patch::Merge(patch)).await
}

/// Sends a strategic merge patch of the status subresource; for built-in kinds only, whose lists merge by key.
///
/// # Errors
/// See [`Error`].
pub async fn patch_status_strategic<K: Object>(
    api: &Api<K>,
    name: &str,
    patch: &Value,
) -> Result<Stored<K>, Error> {
    send_patch(
        api,
        "patch_status",
        name,
        Some("status"),
        &Patch::Strategic(patch),
    )
    .await
}

/// Sends a strategic merge patch of the object itself; for built-in kinds only.
///
/// # Errors
/// See [`Error`].
pub async fn patch_strategic<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<Stored<K>, Error> {
    send_patch(api, "patch", name, None, &Patch::Strategic(patch)).await
}

/// Dry run of a strategic merge patch of the object: checks whether it would be accepted.
///
/// # Errors
/// See [`Error`].
pub async fn dry_run_patch_strategic<K: Object>(
    api: &Api<K>,
    name: &str,
    patch: &Value,
) -> Result<(), Error> {
    send_dry_run_patch(api, "patch", name, None, &Patch::Strategic(patch)).await
}

/// Sends a strategic merge patch of the resize subresource of a Pod.
///
/// # Errors
/// See [`Error`].
pub async fn patch_resize<K: Object>(api: &Api<K>, name: &str, patch: &Value) -> Result<Stored<K>, Error> {
    send_patch(
        api,
        "patch_resize",
        name,
        Some("resize"),
        &Patch::Strategic(patch),
    )
    .await
}

/// Replaces the whole object; only for kinds that are ours alone, such as a Lease or a Secret copy.
///
/// # Errors
/// See [`Error`]; [`Error::conflict`] when `object` is not the newest.
pub async fn replace<K: Object>(api: &Api<K>, object: &K) -> Result<Stored<K>, Error> {
    let name = object.meta().name.as_deref();
    validate_names(api, name)?;
    let body = serde_json::to_vec(object).map_err(kube::Error::SerdeError)?;
    let request = Request::new(api.resource_url());
    let request = request.replace(name.unwrap_or_default(), &PostParams::default(), body);
    send_write(api, "update", request).await
}

/// Deletes the object of that name, if it still has that UID. It is no error if it is already deleted.
///
/// # Errors
/// See [`Error`]; [`Error::conflict`] when a different object has the name now.
pub async fn delete<K: Object>(api: &Api<K>, name: &str, uid: &str) -> Result<(), Error> {
    delete_if_unchanged(api, name, uid, None).await
}

/// The same, if the object still has that version, too.
///
/// # Errors
/// See [`Error`]; [`Error::conflict`] when the object has changed.
pub async fn delete_if_unchanged<K: Object>(
    api: &Api<K>,
    name: &str,
    uid: &str,
    resource_version: Option<&str>,
) -> Result<(), Error> {
    validate_names(api, Some(name))?;
    let preconditions = kube::api::Preconditions {
        // No object has an empty UID.
        uid: Some(uid.to_owned()),
        resource_version: resource_version.map(str::to_owned),
    };
    let params = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    let request = Request::new(api.resource_url()).delete(name, &params);
    // `Api::delete` parses the response twice; it is the whole object, and it is not used.
    let client = api.clone().into_client();
    let delete = async {
        client
            .request_text(request.map_err(kube::Error::BuildRequest)?)
            .await
    };
    match with_kind_metrics::<K, _>("delete", delete).await {
        Ok(_) => Ok(()),
        Err(error) if error.not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Reads the object of that name from the API server, `None` when there is none.
///
/// # Errors
/// See [`Error`].
pub async fn get<K: Object>(api: &Api<K>, name: &str) -> Result<Option<K>, Error> {
    let found = get_as::<K>(api.clone(), name).await?;
    found
        .map(|object| or_unreadable::<K, _>("get", object))
        .transpose()
}

/// Reads the object of that name from the API server as an `R`, `None` when there is none; the inner error is why it
/// cannot be read.
///
/// # Errors
/// See [`Error`].
pub async fn get_as<R>(api: Api<R::Kind>, name: &str) -> Result<Option<Result<R, String>>, Error>
where
    R: ObjectView + Clone + DeserializeOwned,
{
    validate_names(&api, Some(name))?;
    let request = Request::new(api.resource_url()).get(name, &GetParams::default());
    let client = api.into_client();
    let get = send::<Lenient<R>>(&client, request);
    none_if_not_found(
        with_timeout(&R::Kind::kind(&()), "get", get)
            .await
            .map(Lenient::into_result),
    )
}

/// The object that was read, `None` when there is none.
fn none_if_not_found<T>(answer: Result<T, Error>) -> Result<Option<T>, Error> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Metadata of an object, read by a metadata-only request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name of the object.
    pub name: String,
    /// UID of the object.
    #[serde(default)]
    pub uid: String,
    /// The owners of the object.
    #[serde(default)]
    pub owner_references: Vec<OwnerReference>,
    /// Namespace, `None` for cluster-scoped kinds.
    pub namespace: Option<String>,
    /// Version of the object.
    pub resource_version: Option<String>,
    /// Generation, for kinds that have one.
    pub generation: Option<i64>,
    /// When its deletion was requested.
    pub deletion_timestamp: Option<String>,
    /// One entry per field manager.
    #[serde(default)]
    pub managed_fields: Vec<ManagedFields>,
}

/// The fields of one manager, as received: any writer of the object can write this, too, so it may be nested too deep
/// to parse, or hold a time that our types cannot.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
pub struct ManagedFields(Box<RawValue>);

impl ManagedFields {
    /// Their `apiVersion` and operation.
    #[must_use]
    pub fn origin(&self) -> (String, String) {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Origin {
            api_version: String,
            operation: String,
        }
        let Origin {
            api_version,
            operation,
        } = serde_json::from_str(self.0.get()).unwrap_or_default();
        (api_version, operation)
    }
}

/// A merge patch of managed fields. The default changes nothing: the API server stores the object again.
#[derive(Debug, Default, Serialize)]
pub struct ManagedFieldsPatch<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<ManagedFieldsMetadata<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ManagedFieldsMetadata<'a> {
    resource_version: Option<&'a str>,
    #[serde(serialize_with = "at_least_one")]
    managed_fields: Vec<&'a ManagedFields>,
}

impl<'a> ManagedFieldsPatch<'a> {
    /// For an object of that version; of a different version it is a conflict.
    #[must_use]
    pub fn new(resource_version: Option<&'a str>, managed_fields: Vec<&'a ManagedFields>) -> Self {
        let metadata = ManagedFieldsMetadata {
            resource_version,
            managed_fields,
        };
        Self {
            metadata: Some(metadata),
        }
    }
}

/// An empty list would leave the managed fields unchanged.
fn at_least_one<S: Serializer>(all: &[&ManagedFields], serializer: S) -> Result<S::Ok, S::Error> {
    if all.is_empty() {
        return [Map::new()].serialize(serializer);
    }
    all.serialize(serializer)
}

/// An object, read by a metadata-only request.
#[derive(Clone, Debug, Deserialize)]
pub struct PartialObject {
    /// Metadata of the object.
    pub metadata: Metadata,
}

/// Reads names and other metadata of a page of objects; of fewer than requested if these are too large.
///
/// # Errors
/// See [`Error`].
pub async fn list_metadata<K: Resource + Clone + Debug + DeserializeOwned>(
    api: &Api<K>,
    kind: &K::DynamicType,
    params: &ListParams,
) -> Result<ObjectList<PartialObject>, Error> {
    validate_names_as(api, kind, None)?;
    let (client, mut params) = (api.clone().into_client(), params.clone());
    let (kind, path) = (K::kind(kind), api.resource_url());
    page::fetch_fitting(
        &client,
        path,
        Request::list_metadata,
        &mut params,
        &kind,
        REQUEST_TIMEOUT,
    )
    .await
}

/// Reads a page of objects as `R`s; of fewer than requested if these are too large.
///
/// # Errors
/// See [`Error`].
pub async fn list<R>(api: &Api<R::Kind>, params: &ListParams) -> Result<ObjectList<R>, Error>
where
    R: ObjectView<Kind: Clone> + Clone + DeserializeOwned,
{
    validate_names(api, None)?;
    let (client, mut params) = (api.clone().into_client(), params.clone());
    let (kind, path) = (R::Kind::kind(&()), api.resource_url());
    page::fetch_fitting(&client, path, Request::list, &mut params, &kind, REQUEST_TIMEOUT).await
}

/// Reads the metadata of the object of that name, `None` when there is none.
///
/// # Errors
/// See [`Error`].
pub async fn get_metadata(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    name: &str,
) -> Result<Option<Metadata>, Error> {
    let object: Option<PartialObject> = get_partial(api, resource, name).await?;
    Ok(object.map(|object| object.metadata))
}

/// Requests the metadata of the object of that name, and reads it as an `R`, `None` when there is none.
///
/// # Errors
/// See [`Error`].
pub async fn get_partial<K: Resource + Clone, R: DeserializeOwned>(
    api: &Api<K>,
    kind: &K::DynamicType,
    name: &str,
) -> Result<Option<R>, Error> {
    validate_names_as(api, kind, Some(name))?;
    let request = Request::new(api.resource_url()).get_metadata(name, &GetParams::default());
    let client = api.clone().into_client();
    let get = send::<R>(&client, request);
    none_if_not_found(with_timeout(&K::kind(kind), "get", get).await)
}

/// Sends a JSON merge patch of the object itself; only metadata is returned.
///
/// # Errors
/// See [`Error`].
pub async fn patch_metadata(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    name: &str,
    patch: &(impl Serialize + Debug),
) -> Result<(), Error> {
    validate_names_as(api, resource, Some(name))?;
    let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
    let request = Request::new(api.resource_url()).patch_metadata(name, &params, &patch);
    let client = api.clone().into_client();
    let patch = send::<IgnoredAny>(&client, request);
    with_metrics(&resource.kind, "patch", patch).await.map(drop)
}

/// A request as kube builds it.
type BuiltRequest = Result<http::Request<Vec<u8>>, request::Error>;

/// Sends the request, and reads the response.
async fn send<T: DeserializeOwned>(client: &Client, request: BuiltRequest) -> Result<T, kube::Error> {
    // Boxed, because it is large, and part of every duty's future.
    Box::pin(client.request(request.map_err(kube::Error::BuildRequest)?)).await
}

/// Sends a write.
async fn send_write<K: Object>(
    api: &Api<K>,
    verb: &'static str,
    request: BuiltRequest,
) -> Result<Stored<K>, Error> {
    let client = api.clone().into_client();
    let answer = with_kind_metrics::<K, _>(verb, send::<Lenient<K>>(&client, request)).await?;
    let object = answer.into_result();
    Ok(Stored { verb, object })
}

/// Sends a patch of the object, or of one of its subresources.
async fn send_patch<K: Object>(
    api: &Api<K>,
    verb: &'static str,
    name: &str,
    subresource: Option<&str>,
    patch: &Patch<impl Serialize + Debug>,
) -> Result<Stored<K>, Error> {
    validate_names(api, Some(name))?;
    let request = build_patch(api, name, subresource, &PatchParams::default(), patch);
    send_write(api, verb, request).await
}

/// Sends a patch as a dry run.
async fn send_dry_run_patch<K: Object>(
    api: &Api<K>,
    verb: &'static str,
    name: &str,
    subresource: Option<&str>,
    patch: &Patch<impl Serialize + Debug>,
) -> Result<(), Error> {
    validate_names(api, Some(name))?;
    let params = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let request = build_patch(api, name, subresource, &params, patch);
    let client = api.clone().into_client();
    // The response is the whole object, and it is not used.
    let answer = async {
        client
            .request_text(request.map_err(kube::Error::BuildRequest)?)
            .await
    };
    with_timeout(&K::kind(&()), verb, answer).await.map(drop)
}

fn build_patch<K: Object>(
    api: &Api<K>,
    name: &str,
    subresource: Option<&str>,
    params: &PatchParams,
    patch: &Patch<impl Serialize + Debug>,
) -> BuiltRequest {
    let request = Request::new(api.resource_url());
    match subresource {
        Some(subresource) => request.patch_subresource(subresource, name, params, patch),
        None => request.patch(name, params, patch),
    }
}

fn validate_names<K: Resource<DynamicType = ()>>(api: &Api<K>, name: Option<&str>) -> Result<(), Error> {
    validate_names_as(api, &(), name)
}

/// Refuses an invalid name or namespace. kube writes both into the path as they are.
fn validate_names_as<K: Resource>(
    api: &Api<K>,
    kind: &K::DynamicType,
    name: Option<&str>,
) -> Result<(), Error> {
    let path = api.resource_url();
    let namespace = path.split_once("/namespaces/").map(|(_, rest)| {
        let end = format!("/{}", K::plural(kind));
        rest.strip_suffix(end.as_str()).unwrap_or(rest)
    });
    // The path as kube builds it for this kind and namespace, so that it contains nothing else.
    if K::url_path(kind, namespace) != path || namespace.is_some_and(|namespace| !names::is_label(namespace))
    {
        return Err(Error::InvalidNamespace {
            kind: K::kind(kind).into_owned(),
            given: truncate_name(namespace.unwrap_or(path)),
        });
    }
    match name {
        Some(name) if !names::is_subdomain(name) => Err(Error::InvalidName {
            kind: K::kind(kind).into_owned(),
            given: truncate_name(name),
        }),
        _ => Ok(()),
    }
}

/// As much of an invalid name as fits into a message.
fn truncate_name(text: &str) -> String {
    text.chars().take(MAX_SHOWN_CHARS).collect()
}

async fn with_kind_metrics<K: Object, T>(
    verb: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    with_metrics(&K::kind(&()), verb, call).await
}

async fn with_metrics<T>(
    kind: &str,
    verb: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    let result = with_timeout(kind, verb, call).await;
    let result_label = result.as_ref().map_or_else(Error::category, |_| "ok");
    let labels = [
        ("kind", kind.to_owned()),
        ("verb", verb.to_owned()),
        ("result", result_label.to_owned()),
    ];
    metrics().api_writes.get_or_create(&labels).inc();
    result
}

async fn with_timeout<T>(
    kind: &str,
    verb: &'static str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(REQUEST_TIMEOUT, call).await {
        Ok(result) => result.map_err(Error::from),
        Err(_) => Err(Error::Timeout {
            verb,
            kind: kind.to_owned(),
            after: REQUEST_TIMEOUT,
        }),
    }
}

/// A merge patch to the whole status. A merge patch keeps fields that it does not name, so those of `optional` that the
/// status lacks are null in it.
pub fn status_patch<const N: usize>(uid: &str, status: &impl Serialize, optional: [&str; N]) -> Value {
    let mut fields = Map::from_iter(optional.map(|field| (field.to_owned(), Value::Null)));
    if let Ok(Value::Object(status)) = serde_json::to_value(status) {
        fields.extend(status);
    }
    json!({ "metadata": { "uid": uid }, "status": fields })
}

#[cfg(test)]
mod tests;

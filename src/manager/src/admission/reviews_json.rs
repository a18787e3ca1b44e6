//! Reads reviews from their JSON, and writes the answers.
//!
//! A review that cannot be read is rejected in a valid answer: the API server takes any other answer for a failed
//! webhook, and most of ours fail open.

use std::fmt;

use axum::http::StatusCode;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::core::Status;
use serde::de::{Error as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::review::{Decision, Object, Request};
use kruise_api::names;
use kruise_api::validation::{FieldErrors, truncate};

/// Maximum length of a parse error, in characters: it may quote any part of the body.
const MAX_ERROR_CHARS: usize = 500;

/// The fields of an `AdmissionReview` that are parsed.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewBody<R> {
    api_version: String,
    kind: String,
    request: R,
}

/// The UID of a review.
#[derive(Deserialize)]
struct ReviewUid {
    uid: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionRequest {
    uid: String,
    kind: GroupVersionKind,
    request_kind: Option<GroupVersionKind>,
    namespace: Option<String>,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    old_object: Value,
    #[serde(default)]
    options: Value,
}

/// What is parsed of a review that takes too much memory.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LargeRequest<'a> {
    uid: String,
    #[serde(borrow)]
    old_object: Option<&'a RawValue>,
}

/// What is parsed of a large object.
#[derive(Deserialize)]
struct LargeObject {
    metadata: LargeObjectMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct LargeObjectMeta {
    deletion_timestamp: Option<IgnoredAny>,
}

/// The version of the request.
#[derive(Deserialize)]
struct GroupVersionKind {
    version: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConversionRequest<'a> {
    uid: String,
    #[serde(rename = "desiredAPIVersion")]
    desired_api_version: String,
    #[serde(borrow)]
    objects: RawItems<'a>,
}

/// The items of a list as unparsed JSON.
struct RawItems<'a>(Vec<&'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for RawItems<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawItemsVisitor;
        impl<'de> Visitor<'de> for RawItemsVisitor {
            type Value = RawItems<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of objects")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawItems<'de>, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = list.next_element()? {
                    if texts.len() == MAX_OBJECTS {
                        let why = format!("the list has too many objects: {MAX_OBJECTS} are the most");
                        return Err(A::Error::custom(why));
                    }
                    texts.push(text);
                }
                Ok(RawItems(texts))
            }
        }
        deserializer.deserialize_seq(RawItemsVisitor)
    }
}

/// A review that needs an answer.
#[derive(Clone, Debug)]
pub(super) struct PendingReview {
    api_version: String,
    kind: String,
    uid: String,
}

/// The content of a review: `None` for a deletion, which needs no check.
type RequestToCheck = Option<Request>;

/// The JSON of the objects to convert, and the desired `apiVersion`.
type ConversionItems<'a> = (Vec<&'a RawValue>, String);

/// Maximum memory of the parsed objects of one review, in bytes. Objects of 1.5 MiB, the limit of etcd, take some 18
/// MiB.
pub(super) const MAX_OBJECT_MEMORY: usize = 32 << 20;
/// Maximum number of objects in one conversion.
const MAX_OBJECTS: usize = 100_000;

/// Why a body cannot be processed.
#[derive(Debug)]
pub(super) enum Unreadable {
    /// It is no review, or cannot be parsed at all: HTTP status and reason.
    NotAReview(StatusCode, String),
    /// It is a review with content that cannot be processed.
    Review(PendingReview, String),
}

fn parse_review<'a, R: Deserialize<'a>>(body: &'a [u8]) -> Result<(PendingReview, R), Unreadable> {
    let pending = |api_version, kind| PendingReview {
        api_version,
        kind,
        uid: String::new(),
    };
    match serde_json::from_slice::<ReviewBody<R>>(body) {
        Ok(review) => Ok((pending(review.api_version, review.kind), review.request)),
        // Fields that are skipped may have any depth.
        Err(why) => match serde_json::from_slice::<ReviewBody<ReviewUid>>(body) {
            Ok(review) => {
                let mut pending = pending(review.api_version, review.kind);
                pending.uid = review.request.uid;
                // The controllers could not parse it either.
                Err(Unreadable::Review(pending, unreadable_message(&why)))
            }
            Err(_) => {
                let why = format!("this is no review: {why}");
                Err(Unreadable::NotAReview(
                    StatusCode::BAD_REQUEST,
                    truncate(&why, MAX_ERROR_CHARS).into_owned(),
                ))
            }
        },
    }
}

/// Reads an `AdmissionReview`.
///
/// # Errors
/// When it cannot be parsed, or has content that no API server sends.
pub(super) fn parse_admission(body: &[u8]) -> Result<(PendingReview, RequestToCheck), Unreadable> {
    let (mut review, fields) = parse_review::<AdmissionRequest>(body)?;
    review.uid = fields.uid;
    if fields.object.is_null() {
        return Ok((review, None));
    }
    let namespace = fields.namespace.unwrap_or_default();
    if !namespace.is_empty() && !names::is_label(&namespace) {
        let mut errors = FieldErrors::default();
        errors.add("request.namespace", &namespace.into(), names::LABEL);
        return Err(Unreadable::Review(review, errors.into_messages().concat()));
    }
    let old = Some(fields.old_object).filter(|old| !old.is_null());
    let objects =
        Object::parse(fields.object).and_then(|object| Ok((object, old.map(Object::parse).transpose()?)));
    match objects {
        Ok((object, old)) => {
            let version = fields.request_kind.unwrap_or(fields.kind).version;
            let strict = fields.options.get("fieldValidation").and_then(Value::as_str) == Some("Strict");
            let request = Request {
                object,
                old,
                namespace,
                version,
                strict,
            };
            Ok((review, Some(request)))
        }
        Err(why) => Err(Unreadable::Review(review, why)),
    }
}

/// Reads an `AdmissionReview` of a deletion: the object that is deleted, if the review has it.
///
/// # Errors
/// When it cannot be parsed, or has content that no API server sends.
pub(super) fn parse_deletion(body: &[u8]) -> Result<(PendingReview, Option<Object>), Unreadable> {
    let (mut review, fields) = parse_review::<AdmissionRequest>(body)?;
    review.uid = fields.uid;
    if fields.old_object.is_null() {
        return Ok((review, None));
    }
    match Object::parse(fields.old_object) {
        Ok(object) => Ok((review, Some(object))),
        Err(why) => Err(Unreadable::Review(review, why)),
    }
}

/// Reads an `AdmissionReview` that takes too much memory: whether the stored object is being deleted.
///
/// # Errors
/// When it is no review.
pub(super) fn parse_large(body: &[u8]) -> Result<(PendingReview, bool), Unreadable> {
    let (mut review, fields) = parse_review::<LargeRequest<'_>>(body)?;
    review.uid = fields.uid;
    let old = fields
        .old_object
        .and_then(|old| serde_json::from_str::<LargeObject>(old.get()).ok());
    Ok((
        review,
        old.is_some_and(|old| old.metadata.deletion_timestamp.is_some()),
    ))
}

/// Reads a `ConversionReview`.
///
/// # Errors
/// When it cannot be parsed.
pub(super) fn parse_conversion(body: &[u8]) -> Result<(PendingReview, ConversionItems<'_>), Unreadable> {
    let (mut review, fields) = parse_review::<ConversionRequest>(body)?;
    review.uid = fields.uid;
    Ok((review, (fields.objects.0, fields.desired_api_version)))
}

fn unreadable_message(why: &serde_json::Error) -> String {
    let why = format!("this object cannot be read; fields may be nested some 120 levels deep: {why}");
    truncate(&why, MAX_ERROR_CHARS).into_owned()
}

/// A review with its answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReviewAnswer<A> {
    api_version: String,
    kind: String,
    response: ReviewResponse<A>,
}

#[derive(Serialize)]
struct ReviewResponse<A> {
    uid: String,
    #[serde(flatten)]
    answer: A,
}

/// The answer to an `AdmissionReview`.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionResponse {
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// The answer to a `ConversionReview` that failed.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ConversionFailure {
    result: Status,
    converted_objects: [(); 0],
}

impl PendingReview {
    fn with_response<A>(self, answer: A) -> ReviewAnswer<A> {
        ReviewAnswer {
            api_version: self.api_version,
            kind: self.kind,
            response: ReviewResponse {
                uid: self.uid,
                answer,
            },
        }
    }

    /// Answers with the smallest patch of `original`.
    pub fn with_decision(self, original: &Value, decision: Decision) -> ReviewAnswer<AdmissionResponse> {
        self.with_response(match decision {
            Decision::Deny { code, message: why } => denied(code, &why),
            Decision::Allow { object, warnings } => match patch(original, &object) {
                Ok(patch) => AdmissionResponse {
                    allowed: true,
                    patch_type: patch.as_ref().map(|_| "JSONPatch"),
                    patch,
                    warnings,
                    ..AdmissionResponse::default()
                },
                Err(why) => denied(500, &format!("no patch can be made: {why}")),
            },
        })
    }

    /// Allows the request without changes.
    pub fn allowed(self) -> ReviewAnswer<AdmissionResponse> {
        self.with_response(AdmissionResponse {
            allowed: true,
            ..AdmissionResponse::default()
        })
    }

    /// Answers with the error of a conversion.
    pub fn conversion_failed(self, why: Status) -> ReviewAnswer<ConversionFailure> {
        self.with_response(ConversionFailure {
            result: why,
            converted_objects: [],
        })
    }

    /// The JSON before and after the list of converted objects.
    ///
    /// # Errors
    /// When it cannot be serialized.
    pub fn conversion_parts(self) -> Result<(String, &'static str), serde_json::Error> {
        let text = |text: &str| serde_json::to_string(text);
        let (version, kind, uid) = (text(&self.api_version)?, text(&self.kind)?, text(&self.uid)?);
        let result = serde_json::to_string(&Status::success())?;
        let head = format!(
            r#"{{"apiVersion":{version},"kind":{kind},"response":{{"uid":{uid},"result":{result},"convertedObjects":["#
        );
        Ok((head, "]}}"))
    }
}

fn denied(code: u16, why: &str) -> AdmissionResponse {
    let reason = match code {
        403 => "Forbidden",
        413 => "RequestEntityTooLarge",
        422 => "Invalid",
        _ => "InternalError",
    };
    AdmissionResponse {
        status: Some(Status::failure(why, reason).with_code(code)),
        ..AdmissionResponse::default()
    }
}

/// The JSON Patch from `original` to `desired`; `None` when they are equal.
fn patch(original: &Value, desired: &Value) -> Result<Option<String>, serde_json::Error> {
    let patch = json_patch::diff(original, desired);
    if patch.0.is_empty() {
        return Ok(None);
    }
    Ok(Some(BASE64_STANDARD.encode(serde_json::to_vec(&patch)?)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use serde_json::json;

    use super::*;

    /// The JSON of an `AdmissionReview` with these fields in its request.
    fn review(request: &Value) -> Vec<u8> {
        let mut review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "name": "n", "operation": "CREATE", "userInfo": {},
                "kind": { "group": "g", "version": "v", "kind": "K" },
            },
        });
        json_patch::merge(&mut review["request"], request);
        review.to_string().into_bytes()
    }

    fn object() -> Value {
        json!({ "apiVersion": "g/v", "kind": "K", "metadata": { "name": "n" }, "spec": { "a": 1 } })
    }

    fn respond_to(decision: Decision) -> Value {
        let (review, request) = parse_admission(&review(&json!({ "object": object() }))).unwrap();
        let answer = serde_json::to_value(review.with_decision(&request.unwrap().object, decision)).unwrap();
        assert_eq!(answer["kind"], "AdmissionReview");
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["response"]["uid"], "u");
        answer["response"].clone()
    }

    #[test]
    fn responses_carry_messages_and_minimal_patch() {
        let no = respond_to(Decision::Deny {
            code: 422,
            message: "spec.a: Invalid value: 1: too small".into(),
        });
        assert_eq!(no["allowed"], false);
        assert_eq!(no["status"]["message"], "spec.a: Invalid value: 1: too small");
        assert_eq!(no["status"]["code"], 422);

        let yes = respond_to(Decision::Allow {
            object: object(),
            warnings: vec!["look".into()],
        });
        assert_eq!((&yes["allowed"], &yes["patch"]), (&json!(true), &Value::Null));
        assert_eq!(yes["warnings"], json!(["look"]));

        let mut other = object();
        other["spec"]["b"] = json!(2);
        let yes = respond_to(Decision::Allow {
            object: other,
            warnings: Vec::new(),
        });
        assert_eq!(yes["patchType"], "JSONPatch");
        let patch = BASE64_STANDARD.decode(yes["patch"].as_str().unwrap()).unwrap();
        assert_eq!(
            serde_json::from_slice::<Value>(&patch).unwrap(),
            json!([{ "op": "add", "path": "/spec/b", "value": 2 }])
        );
    }

    #[test]
    fn version_is_the_users_and_null_is_absent() {
        let parsed = |request: Value| parse_admission(&review(&request)).unwrap().1;
        let new = parsed(json!({ "object": object(), "namespace": "ns" })).unwrap();
        assert_eq!((new.version.as_str(), new.namespace.as_str()), ("v", "ns"));
        assert_eq!((new.object.to_json(), new.old), (object(), None));
        let other =
            json!({ "object": object(), "oldObject": object(), "requestKind": { "version": "older" } });
        let changed = parsed(other).unwrap();
        assert_eq!(
            (changed.version.as_str(), changed.old),
            ("older", Some(Object::for_test(object())))
        );
        assert!(parsed(json!({ "oldObject": object() })).is_none(), "a deletion");
    }

    #[test]
    fn too_deep_objects_are_refused_by_uid() {
        let deep = format!("{}0{}", "[".repeat(100_000), "]".repeat(100_000));
        let text = String::from_utf8(review(&json!({ "object": { "spec": "DEEP" } }))).unwrap();
        match parse_admission(text.replace("\"DEEP\"", &deep).as_bytes()) {
            Err(Unreadable::Review(open, why)) => {
                assert_eq!(open.uid, "u");
                assert!(why.contains("recursion"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        for body in ["", "{}", &deep, r#"{"apiVersion":"v","kind":"K"}"#] {
            assert!(
                matches!(
                    parse_admission(body.as_bytes()),
                    Err(Unreadable::NotAReview(StatusCode::BAD_REQUEST, _))
                ),
                "{body:.20}"
            );
        }
    }

    #[test]
    fn large_reviews_are_read_by_uid_and_deletion() {
        let deep = format!("{}0{}", "[".repeat(100_000), "]".repeat(100_000));
        let read = |object: &Value, old: &Value| {
            let text = String::from_utf8(review(&json!({ "object": object, "oldObject": old }))).unwrap();
            let (open, is_deleted) = parse_large(text.replace("\"DEEP\"", &deep).as_bytes()).unwrap();
            assert_eq!((open.kind.as_str(), open.uid.as_str()), ("AdmissionReview", "u"));
            is_deleted
        };
        let stored = json!({ "metadata": { "name": "n" }, "spec": "DEEP" });
        let deleted = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" }, "spec": "DEEP" });
        // The new object may have what its writer likes.
        for (object, old, is_deleted) in [
            (&stored, &Value::Null, false),
            (&deleted, &Value::Null, false),
            (&deleted, &stored, false),
            (&deleted, &json!("x"), false),
            (&deleted, &deleted, true),
            (&Value::Null, &deleted, true),
        ] {
            assert_eq!(read(object, old), is_deleted, "{object} {old}");
        }
        assert!(matches!(parse_large(b"{}"), Err(Unreadable::NotAReview(..))));
    }

    #[test]
    fn invalid_namespace_is_refused_by_field() {
        for namespace in ["default/podtemplates?x=", "../x", "a.b", "A", "#"] {
            let text = review(&json!({ "object": object(), "namespace": namespace }));
            let Err(Unreadable::Review(open, why)) = parse_admission(&text) else {
                panic!("{namespace:?} was read")
            };
            assert_eq!(open.uid, "u");
            let start =
                format!("request.namespace: Invalid value: {namespace:?}: a lowercase RFC 1123 label");
            assert!(why.starts_with(&start), "{why}");
        }
    }
}
